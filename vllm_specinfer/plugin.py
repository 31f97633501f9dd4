"""Entry point of vLLM's general plugins.

vLLM calls ``register`` in every process, before engine arguments become a config.
"""

from vllm_specinfer.flags import DISABLE_ENV, is_on


def register() -> None:
    """Teach vLLM the method "specinfer"; nothing else changes.

    Only names its switches where ``VLLM_SPECINFER_DISABLE=1``. May be called again.
    """
    from vllm_specinfer.hooks import switches

    switches.install()
    if is_on(DISABLE_ENV):
        return
    from vllm_specinfer.hooks import sampling_params, speculative_config

    speculative_config.install()
    sampling_params.install()
