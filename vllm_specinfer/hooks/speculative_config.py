"""The one wrapper on every platform: vLLM learns the method "specinfer".

Symptom: vLLM validates ``method`` against a closed list.
Removed when: vLLM lets plugins register a speculative method.
"""

import functools
import os
from typing import TYPE_CHECKING, Any

from vllm_specinfer.options import METHOD

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

SCHEDULER = "vllm_specinfer.scheduling.scheduler.SpecInferScheduler"
V2_ENV = "VLLM_USE_V2_MODEL_RUNNER"

_MARK = "_specinfer_original"


def install() -> None:
    """Wrap ``EngineArgs.create_speculative_config`` once."""
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_speculative_config
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def create_speculative_config(
        self: "EngineArgs",
        target_model_config: "ModelConfig",
        target_parallel_config: "ParallelConfig",
    ) -> "SpeculativeConfig | None":
        if _method(self) != METHOD:
            return original(
                self,
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        return _create(self, target_model_config, target_parallel_config)

    setattr(create_speculative_config, _MARK, original)
    EngineArgs.create_speculative_config = create_speculative_config


def _method(args: "EngineArgs") -> str | None:
    config = args.speculative_config
    if isinstance(config, dict) and config.get("method") is not None:
        return config["method"]
    return getattr(args, "spec_method", None)


def _create(
    args: "EngineArgs",
    target_model_config: "ModelConfig",
    target_parallel_config: "ParallelConfig",
) -> "SpeculativeConfig":
    from vllm_specinfer import compat

    _refuse(compat.unsupported_reason())

    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from vllm_specinfer import refusals
    from vllm_specinfer.config import SpecInferConfig, worker_cls
    from vllm_specinfer.options import parse_options

    options = parse_options(_merge_flags(args))
    _refuse(_replaced_class_reason("scheduler_cls", args.scheduler_cls, SCHEDULER))
    _refuse(
        _replaced_class_reason(
            "worker_cls", target_parallel_config.worker_cls, worker_cls()
        )
    )
    _refuse(refusals.engine_args_reason(args))
    _refuse(refusals.parallel_reason(target_parallel_config, target_model_config))
    _refuse(refusals.model_reason(target_model_config, "the target"))

    config = SpecInferConfig.create(
        options, target_model_config, target_parallel_config
    )
    for ssm in config.ssm_model_configs:
        _refuse(refusals.model_reason(ssm, "the SSM"))
        _refuse(refusals.vocabulary_reason(ssm, target_model_config))

    # Nothing outside the config changes before this line: a refusal leaves vLLM as
    # it was.
    if current_platform.is_cpu():
        from vllm_specinfer.hooks import cpu_v2

        cpu_v2.enable_in_frontend()
    # Workers inherit it; without it vLLM may fall back to the V1 runner silently.
    os.environ[V2_ENV] = "1"
    args.scheduler_cls = SCHEDULER
    if options.truncation_notice is not None:
        init_logger(__name__).warning("%s", options.truncation_notice)
    return config


def _merge_flags(args: "EngineArgs") -> dict[str, Any]:
    """The user's dictionary with --spec-method, --spec-model and --spec-tokens."""
    merged = {
        key.replace("-", "_"): value
        for key, value in (args.speculative_config or {}).items()
    }
    for flag, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        value = getattr(args, flag, None)
        if value is None:
            continue
        if key in merged:
            raise ValueError(
                f"--{flag.replace('_', '-')} and --speculative-config[{key!r}] must "
                "not both be given; got both"
            )
        merged[key] = value
    return merged


def _replaced_class_reason(name: str, value: Any, ours: str) -> str | None:
    if value in (None, "auto", ours):
        return None
    return f"{name} must be left out with method specinfer; got {value!r}"


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(reason)
