"""Whether a model is a draft head, by its architecture.

Standard library only at import.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.config import ModelConfig


def eagle_type(model: "ModelConfig | PreTrainedConfig") -> str | None:
    """The type of an EAGLE head by its architecture; None for all other models."""
    head = draft_head(model)
    if head is None or "Eagle" not in head or "MTP" in head or head.startswith("PE"):
        return None
    return "eagle3" if "Eagle3" in head else "eagle"


def reads_layers(head: "ModelConfig") -> bool:
    """Whether a head reads the states of some of the target's layers.

    EAGLE-3 heads do, unless their config says that they read the last ones, as EAGLE
    heads do.
    """
    about = getattr(head.hf_config, "eagle_config", None) or {}
    return eagle_type(head) == "eagle3" and about.get("use_aux_hidden_state", True)


def draft_head(model: "ModelConfig | PreTrainedConfig") -> str | None:
    """The architecture of one of vLLM's draft heads; None for all other models."""
    from vllm.model_executor.models.registry import _SPECULATIVE_DECODING_MODELS

    for architecture in model.architectures:
        if architecture in _SPECULATIVE_DECODING_MODELS:
            return architecture
    return None
