"""min_p and logit_bias with tree speculation.

Symptom: vLLM refuses requests with min_p or logit_bias wherever speculation is on.
Reason: its own rejection sampler does not apply them; ours calls the plain sampler,
    which does.
Removed when: vLLM asks the speculative config what its verification supports.
"""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import SpeculativeConfig

_MARK = "_specinfer_original"


def install() -> None:
    """Wrap ``SamplingParams._validate_spec_decode`` once."""
    from vllm import SamplingParams

    original = getattr(SamplingParams, "_validate_spec_decode", None)
    # Without it vLLM is not a known one, which is said where an engine starts.
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def _validate_spec_decode(
        self: "SamplingParams", speculative_config: "SpeculativeConfig | None"
    ) -> None:
        if not getattr(speculative_config, "verifies_with_plain_sampler", False):
            original(self, speculative_config)

    setattr(_validate_spec_decode, _MARK, original)
    SamplingParams._validate_spec_decode = _validate_spec_decode
