"""Which requests may speculate: those that greedy verification serves exactly."""

from vllm import SamplingParams

_GREEDY_TEMPERATURE = 1e-5  # vLLM's own threshold, vllm/sampling_params.py


def no_speculation_reason(params: SamplingParams | None) -> str | None:
    """Why a request must decode without drafts.

    Args:
        params: The request's sampling parameters; None for pooling requests.

    Returns:
        The parameter that greedy tree verification does not serve yet, or None.
    """
    if params is None:
        return "pooling"
    reasons = {
        "temperature": params.temperature >= _GREEDY_TEMPERATURE,
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "bad_words": bool(params.bad_words),
        "logit_bias": bool(params.logit_bias),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "min_tokens": params.min_tokens > 0,
        "logprobs": params.logprobs is not None,
        "logprob_token_ids": bool(getattr(params, "logprob_token_ids", None)),
        "structured_outputs": params.structured_outputs is not None,
        "thinking_token_budget": (
            getattr(params, "thinking_token_budget", None) is not None
        ),
        "extra_args": bool(params.extra_args),
    }
    return next((name for name, applies in reasons.items() if applies), None)
