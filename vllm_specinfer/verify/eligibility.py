"""Which requests may speculate: those that tree verification serves exactly."""

from vllm import SamplingParams


def no_speculation_reason(params: SamplingParams | None) -> str | None:
    """Why a request must decode without drafts.

    Args:
        params: The request's sampling parameters; None for pooling requests.

    Returns:
        The parameter that tree verification does not serve yet, or None.
    """
    if params is None:
        return "pooling"
    if params.structured_outputs is not None:
        return "structured_outputs"
    return "extra_args" if params.extra_args else None
