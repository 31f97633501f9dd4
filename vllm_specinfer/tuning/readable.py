"""Whether transformers reads a model's weights, which vLLM may."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.quantizers import AutoHfQuantizer


def check_readable(model: str, role: str = "the target") -> None:
    """Raises ValueError where it needs what is not installed or not there.

    Args:
        model: Folder or hub id.
        role: How the sentence names it.
    """
    config = AutoConfig.from_pretrained(model)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{role} must be one that transformers reads as a causal language model; "
            f"got {config.model_type!r}"
        )
    how = getattr(config, "quantization_config", None)
    # What transformers does not know it reads as if it were not quantized.
    if not how or not AutoHfQuantizer.supports_quant_method(how):
        return
    try:
        quantizer = AutoHfQuantizer.from_config(how, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except (ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{role} must be one that transformers can read here; got {reason}"
        ) from error
