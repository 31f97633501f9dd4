"""min_p and logit_bias with tree speculation.

Symptom: vLLM refuses requests with min_p or logit_bias wherever speculation is on.
Reason: its own rejection sampler does not apply them; ours calls the plain sampler,
    which does.
Removed when: vLLM asks the speculative config what its verification supports.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_specinfer.hooks import wrap

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig


def install() -> None:
    """Wrap ``SamplingParams._validate_spec_decode`` once."""
    from vllm import SamplingParams

    def validate(
        original: Callable[..., None],
        self: "SamplingParams",
        speculative_config: "SpeculativeConfig | None",
    ) -> None:
        if not getattr(speculative_config, "verifies_with_plain_sampler", False):
            original(self, speculative_config)

    # Without it vLLM is not a known one, which is said where an engine starts.
    if hasattr(SamplingParams, "_validate_spec_decode"):
        wrap(SamplingParams, "_validate_spec_decode", validate)
