"""vLLM learns the method "specinfer".

Symptom: vLLM validates ``method`` against a closed list.
Removed when: vLLM lets plugins register a speculative method.
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_specinfer.hooks import wrap
from vllm_specinfer.options import METHOD

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

SCHEDULER = "vllm_specinfer.scheduling.async_scheduler.specinfer_scheduler"
V2_ENV = "VLLM_USE_V2_MODEL_RUNNER"

# The variable's value from before an engine with specinfer, "" for none: in the
# environment, too, as a process that this one starts may run an engine without.
_BEFORE_ENV = "SPECINFER_V2_MODEL_RUNNER_BEFORE"


def install() -> None:
    """Wrap ``EngineArgs.create_speculative_config`` once."""
    from vllm.engine.arg_utils import EngineArgs

    def create(
        original: Callable[..., "SpeculativeConfig | None"],
        self: "EngineArgs",
        target_model_config: "ModelConfig",
        target_parallel_config: "ParallelConfig",
    ) -> "SpeculativeConfig | None":
        if _method(self) != METHOD:
            _switch_runner_off()
            return original(
                self,
                target_model_config=target_model_config,
                target_parallel_config=target_parallel_config,
            )
        return _create(self, target_model_config, target_parallel_config)

    # Without it vLLM is not a known one, and knows no method of this name.
    if hasattr(EngineArgs, "create_speculative_config"):
        wrap(EngineArgs, "create_speculative_config", create)


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
    from vllm_specinfer import compat, refusals

    # First of all: the imports below need a vLLM that is known.
    refusals.refuse(compat.unsupported_reason())

    import vllm
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    from vllm_specinfer.config import SpecInferConfig
    from vllm_specinfer.hooks import cuda_arguments, request_limits, stat_loggers
    from vllm_specinfer.parsing import parse_options

    options = parse_options(_merge_flags(args))
    _check_engine_args(args, target_model_config, target_parallel_config)
    refusals.refuse(refusals.tree_attention_reason(options.tree_attention))
    config = SpecInferConfig.create(
        options, target_model_config, target_parallel_config
    )
    refusals.refuse(
        refusals.checkpoint_cache_reason(
            args.kv_cache_dtype, target_model_config, config.ssm_model_configs
        )
    )
    # Only now, so that a refusal leaves arguments and process as they were.
    args.scheduler_cls = SCHEDULER
    if not current_platform.is_cpu():
        cuda_arguments.choose(args)
    _switch_runner_on()
    stat_loggers.install()
    request_limits.install()
    logger = init_logger(__name__)
    if compat.release(vllm.__version__) is None:
        logger.warning("vLLM %s is not known to specinfer", vllm.__version__)
    if options.truncation_notice is not None:
        logger.warning("%s", options.truncation_notice)
    return config


def _check_engine_args(
    args: "EngineArgs",
    target_model_config: "ModelConfig",
    target_parallel_config: "ParallelConfig",
) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

    from vllm_specinfer import refusals
    from vllm_specinfer.config import worker_cls
    from vllm_specinfer.hooks import cuda_arguments

    refusals.refuse(refusals.device_reason())
    if not current_platform.is_cpu():
        refusals.refuse(cuda_arguments.unsupported_reason(args))
    cache_dtype = resolve_kv_cache_dtype_string(
        args.kv_cache_dtype, target_model_config
    )
    worker = target_parallel_config.worker_cls
    for reason in (
        refusals.runner_reason(),
        refusals.replaced_class_reason("scheduler_cls", args.scheduler_cls, SCHEDULER),
        refusals.replaced_class_reason("worker_cls", worker, worker_cls()),
        refusals.engine_reason(
            args, target_parallel_config, target_model_config, cache_dtype
        ),
    ):
        refusals.refuse(reason)


def _switch_runner_on() -> None:
    """Choose Model Runner V2 for this process and the workers it starts."""
    from vllm.platforms import current_platform

    os.environ.setdefault(_BEFORE_ENV, os.environ.get(V2_ENV, ""))
    if current_platform.is_cpu():
        from vllm_specinfer.hooks import compile_cache, cpu_v2

        compile_cache.enable()
        cpu_v2.enable_in_frontend()
    # Without it vLLM may choose the V1 runner by itself, with no more than a warning.
    _set_runner("1")


def _switch_runner_off() -> None:
    """Give the next engine the runner it had without specinfer."""
    before = os.environ.pop(_BEFORE_ENV, None)
    if before is None:
        return
    _set_runner(before)

    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm_specinfer.hooks import compile_cache, cpu_v2

        cpu_v2.disable_in_frontend()
        if envs.VLLM_ENABLE_V1_MULTIPROCESSING:
            # Else an engine with trees may still run in this process.
            compile_cache.disable()


def _set_runner(value: str) -> None:
    from vllm import envs

    if value:
        os.environ[V2_ENV] = value
    else:
        os.environ.pop(V2_ENV, None)
    # An engine that runs in this process has made vLLM read the environment no more,
    # until the next engine has started.
    envs.disable_envs_cache()


def _merge_flags(args: "EngineArgs") -> dict[str, Any]:
    """The user's dictionary with --spec-method, --spec-model and --spec-tokens."""
    from vllm_specinfer.parsing import normalised

    merged = normalised(args.speculative_config or {})
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
