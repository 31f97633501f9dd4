"""What an engine on CUDA is started with, beside the user's arguments.

Nothing of vLLM is replaced: these are choices that a user could have made.
"""

from typing import TYPE_CHECKING, Any

from vllm_specinfer.refusals import CUDA_BACKEND

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def unsupported_reason(args: "EngineArgs") -> str | None:
    """Why the user's own choices stand in the way, or None."""
    for name, chosen in (
        ("attention_backend", args.attention_backend),
        ("attention_config.backend", args.attention_config.backend),
        ("attention_config.backend_per_kind", args.attention_config.backend_per_kind),
    ):
        if chosen and _name(chosen) not in ("auto", CUDA_BACKEND):
            return (
                f"{name} must be left out with method specinfer, tree attention is a "
                f"backend of its own; got {_name(chosen)}"
            )
    return None


def choose(args: "EngineArgs") -> None:
    """Tree attention; CUDA graphs and asynchronous scheduling are vLLM's default."""
    if args.attention_config.backend is None:
        args.attention_backend = CUDA_BACKEND


def _name(chosen: Any) -> str:
    return getattr(chosen, "name", str(chosen))
