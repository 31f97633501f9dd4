"""What method specinfer refuses at start-up, each in one sentence."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def engine_args_reason(args: "EngineArgs") -> str | None:
    """Why these engine arguments cannot run with specinfer, or None."""
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").strip().lower() in (
        "0",
        "false",
    ):
        return (
            "VLLM_USE_V2_MODEL_RUNNER must be 1 or unset, method specinfer has no V1 "
            "runner; got 0"
        )
    return None


def parallel_reason(parallel: "ParallelConfig", model: "ModelConfig") -> str | None:
    """Why this parallel layout cannot run with specinfer, or None."""
    return None


def model_reason(model: "ModelConfig", role: str) -> str | None:
    """Why this model cannot be a target or an SSM, or None."""
    return None


def vocabulary_reason(ssm: "ModelConfig", target: "ModelConfig") -> str | None:
    """Why this SSM's tokens are not the target's, or None."""
    if ssm.get_vocab_size() != target.get_vocab_size():
        return (
            "the SSM's vocabulary must be the target's "
            f"{target.get_vocab_size()} tokens; got {ssm.get_vocab_size()}"
        )
    return None


def check_vllm_config(vllm_config: "VllmConfig") -> None:
    """Refuse what only the finished config shows; called by the worker.

    Args:
        vllm_config: The worker's config.

    Raises:
        ValueError: One sentence that says what must change.
    """
    if not vllm_config.use_v2_model_runner:
        raise ValueError("the model runner must be V2 for method specinfer; got V1")
