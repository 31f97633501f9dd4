"""What method specinfer refuses at start-up, each in one sentence.

Every ``*_reason`` returns that sentence, or None where nothing is wrong. Those about
models are in ``model_refusals.py``. The front end asks them all before it changes
anything; the worker asks again through ``check_vllm_config``, because a config need not
come from engine arguments.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm_specinfer.flags import CUDA_ENV, is_on
from vllm_specinfer.model_refusals import model_reason
from vllm_specinfer.options import XFORMERS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

# The member of vLLM's enum that is kept free for backends from outside.
CUDA_BACKEND = "CUSTOM"

PLAIN_KV_DTYPES = ("auto", "float16", "bfloat16")
FP8_KV_DTYPES = ("fp8", "fp8_e4m3")
CPU_FP8_KV_DTYPES = (*FP8_KV_DTYPES, "fp8_e5m2")


def runner_reason() -> str | None:
    """Why the environment's model runner cannot run trees, or None."""
    from vllm import envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        return (
            "VLLM_USE_V2_MODEL_RUNNER must be 1 or unset, the V1 runner would draft "
            "a chain; got 0"
        )
    return None


def device_reason() -> str | None:
    """Why the platform cannot run trees, or None."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    if not current_platform.is_cuda():
        return (
            "the platform must be a CPU, or CUDA as an experiment, for method "
            f"specinfer; got {current_platform.device_name}"
        )
    if is_on(CUDA_ENV):
        return None
    return (
        f"{CUDA_ENV} must be 1 for method specinfer on CUDA, which is an "
        f"experiment and has never been run on a GPU; got {os.environ.get(CUDA_ENV)!r}"
    )


def tree_attention_reason(choice: str) -> str | None:
    """Why the chosen implementation of tree attention cannot run here, or None."""
    from vllm.platforms import current_platform

    if choice != XFORMERS:
        return None
    if current_platform.is_cpu():
        return f"tree_attention must be auto on a CPU; got {choice}"
    try:
        import xformers.ops.tree_attention  # noqa: F401
    except Exception as error:  # built for another torch, it fails as it likes
        return (
            "tree_attention must be auto without a working xformers "
            f"(pip install xformers); got {choice}, {error!r}"
        )
    return None


def replaced_class_reason(name: str, value: Any, ours: str) -> str | None:
    """Why the user's own class stands in the way of ours, or None."""
    if value in (None, "auto", ours):
        return None
    return _must_be_out(name, "it brings its own", value)


def feature_reason(config: Any) -> str | None:
    """Why a feature that is switched on cannot run with trees, or None.

    Args:
        config: Engine arguments, which name all of them, or one of the configurations
            they become, which name some each.
    """
    for name, why in (
        ("kv_transfer_config", "a connector would save K/V of rejected nodes"),
        ("kv_offloading_size", "a connector would save K/V of rejected nodes"),
        ("watermark_config", "a watermark constrains the sampler"),
        ("diffusion_config", "a diffusion model has no next token"),
    ):
        value = getattr(config, name, None)
        if value is not None:
            return _must_be_out(name, why, value)
    if getattr(getattr(config, "aux_output_config", None), "enabled", False):
        return _must_be_out(
            "enable_return_routed_experts",
            "vLLM takes the first rows for the accepted ones",
            True,
        )
    grammars = getattr(config, "structured_outputs_config", None)
    if getattr(grammars, "backend", None) == "lm-format-enforcer":
        return (
            "structured_outputs_config.backend must be auto, xgrammar, guidance or "
            "outlines with method specinfer, this one takes no drafts; got "
            f"{grammars.backend}"
        )
    for name, why in (
        ("use_fp64_gumbel", "drafts are drawn in float32"),
        ("return_sampling_mask", "masks are not collected along a path"),
        ("enable_trace_replay", "a replayed token ignores the tree"),
        ("kv_sharing_fast_prefill", "it would attend without the tree"),
    ):
        if value := getattr(config, name, None):
            return _must_be_out(name, why, value)
    return None


def engine_reason(
    config: Any, parallel: "ParallelConfig", target: "ModelConfig", cache_dtype: str
) -> str | None:
    """Why features, parallel layout, KV cache or target cannot run with trees, or None.

    Args:
        config: Engine arguments or a ``VllmConfig``.
        parallel: The target's parallel layout.
        target: The target model's configuration.
        cache_dtype: The KV cache's, resolved.
    """
    from vllm.platforms import current_platform

    return (
        feature_reason(config)
        or feature_reason(target)
        or feature_reason(getattr(config, "cache_config", None))
        or parallel_reason(parallel, target)
        or cache_dtype_reason(cache_dtype, target, current_platform.is_cpu())
        or model_reason(target, "the target")
    )


def parallel_reason(parallel: "ParallelConfig", model: "ModelConfig") -> str | None:
    """Why a parallel layout cannot run with trees, or None."""
    from vllm import envs

    # vLLM 0.33 has only the one that calls workers (vllm/v1/executor/ray_utils.py).
    by_worker = getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    if parallel.distributed_executor_backend == "ray" and not by_worker:
        return (
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND must be 1 or unset with method "
            "specinfer, Ray's other executor goes past the worker, which drafts; got 0"
        )
    for name, why in (
        ("pipeline_parallel_size", "only the last stage would draft and commit"),
        ("decode_context_parallel_size", "it shards the slots of a path"),
        ("prefill_context_parallel_size", "it shards the slots of a path"),
    ):
        value = getattr(parallel, name, 1)
        if value != 1:
            return f"{name} must be 1 with method specinfer, {why}; got {value}"
    if parallel.data_parallel_size > 1 and (
        model.is_moe or parallel.enable_expert_parallel
    ):
        return (
            "data_parallel_size must be 1 for a mixture of experts with method "
            "specinfer, ranks would disagree on the number of passes; got "
            f"{parallel.data_parallel_size}"
        )
    if parallel.use_ubatching:
        return _must_be_out(
            "enable_dbo and ubatch_size",
            "a tree's rows must stay in one batch",
            parallel.num_ubatches,
        )
    for name, why in (
        ("enable_eplb", "SSM passes would count as the target's load"),
        ("enable_batch_sharded_sampling", "verification needs a path's rows together"),
    ):
        if getattr(parallel, name, None):
            return _must_be_out(name, why, True)
    return None


def cache_dtype_reason(
    cache_dtype: str, target: "ModelConfig", is_cpu: bool
) -> str | None:
    """Why a resolved KV cache type cannot hold a tree, or None.

    Where the user leaves the type open, vLLM's attention layers take fp8 for a
    ``kv_cache_scheme`` (vllm/model_executor/layers/attention/attention.py).
    """
    by_checkpoint = cache_dtype == "auto" and _has_cache_scheme(target)
    fp8 = _cpu_fp8_kv_dtypes() if is_cpu else FP8_KV_DTYPES
    # vLLM 0.33 refuses other 16-bit types than the target's, too.
    own = str(target.dtype).removeprefix("torch.")
    plain = ("auto", own) if own in PLAIN_KV_DTYPES else ("auto",)
    if (FP8_KV_DTYPES[0] if by_checkpoint else cache_dtype) in plain + fp8:
        return None
    plain = plain[1:] if by_checkpoint else plain
    asked = " and a kv_cache_scheme, which makes it fp8" if by_checkpoint else ""
    return (
        f"kv_cache_dtype must be one of {', '.join(plain + fp8)} on this "
        f"{'CPU' if is_cpu else 'GPU'} with method specinfer; got {cache_dtype!r}"
        f"{asked}"
    )


def _cpu_fp8_kv_dtypes() -> tuple[str, ...]:
    """What vLLM's CPU kernels can read (vllm/v1/attention/backends/cpu_attn.py)."""
    import torch

    return CPU_FP8_KV_DTYPES if torch.cpu._is_avx512_supported() else ()


def _has_cache_scheme(model: "ModelConfig") -> bool:
    quantization = model.model_arch_config.quantization_config or {}
    return bool(quantization.get("kv_cache_scheme"))


def checkpoint_cache_reason(
    cache_dtype: str, target: "ModelConfig", ssms: Iterable["ModelConfig"]
) -> str | None:
    """Why a KV cache type that only an SSM asks for cannot be, or None."""
    if cache_dtype != "auto" or _has_cache_scheme(target):
        return None
    for ssm in ssms:
        if _has_cache_scheme(ssm):
            return (
                "kv_cache_dtype must be set where an SSM has a kv_cache_scheme and "
                "the target has none, as 'auto' makes the SSM's cache alone fp8; got "
                f"'auto' and {ssm.model!r}"
            )
    return None


def check_vllm_config(vllm_config: "VllmConfig") -> None:
    """Refuse what the finished config shows; the worker calls it in init_device.

    Args:
        vllm_config: The worker's config.

    Raises:
        ValueError: One sentence that says what must change.
    """
    from vllm.platforms import current_platform

    from vllm_specinfer.compat import REQUIRED_IN_WORKER, unsupported_reason
    from vllm_specinfer.config import SpecInferConfig

    refuse(unsupported_reason(REQUIRED_IN_WORKER))
    spec = vllm_config.speculative_config
    if not isinstance(spec, SpecInferConfig):
        raise ValueError(
            "the speculative config must be a SpecInferConfig for this worker; got "
            f"{type(spec).__name__}"
        )
    refuse(device_reason())
    if not current_platform.is_cpu():
        refuse(_cuda_reason(vllm_config))
    refuse(runner_reason())
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "the model runner must be V2 for method specinfer, V1 would draft a "
            "chain; got V1"
        )
    target = vllm_config.model_config
    cache_dtype = vllm_config.cache_config.cache_dtype
    parallel = vllm_config.parallel_config
    refuse(engine_reason(vllm_config, parallel, target, cache_dtype))
    refuse(checkpoint_cache_reason(cache_dtype, target, spec.ssm_model_configs))


def refuse(reason: str | None) -> None:
    """Raise a reason, if there is one."""
    if reason is not None:
        raise ValueError(reason)


def _cuda_reason(vllm_config: "VllmConfig") -> str | None:
    backend = vllm_config.attention_config.backend
    if backend is None or backend.name != CUDA_BACKEND:
        return (
            f"the attention backend must be {CUDA_BACKEND} for method specinfer on "
            f"CUDA; got {backend and backend.name}"
        )
    # vLLM's warm-up runs a prompt of so many (vllm/v1/worker/gpu/warmup.py).
    least = vllm_config.speculative_config.num_speculative_tokens + 2
    most = vllm_config.scheduler_config.max_num_batched_tokens
    if most < least:
        return (
            f"max_num_batched_tokens must be at least {least} with "
            f"{least - 2} num_speculative_tokens on CUDA; got {most}"
        )
    return None


def _must_be_out(name: str, why: str, value: Any) -> str:
    return f"{name} must be left out with method specinfer, {why}; got {value!r}"
