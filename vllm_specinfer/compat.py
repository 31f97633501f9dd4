"""Which vLLM this package works with, and the names it relies on.

Where 0.33 differs from 0.32 the code takes both. These are all the places:

- `hooks/cpu_v2.py`: the worker checks for Triton, too.
- `kernels/cpu/`: `gather_block_tables` and `post_update` have more arguments.
- `verify/stochastic.py`: `Sampler._sample_random` has one more flag.
- `scheduling/grammar.py`: bitmasks have as many rows for every request.
- `scheduling/scheduler.py`: steps may be scheduled for which nobody drafts.
- `worker.py`: `AsyncModelRunnerOutput` has one more method.
- `cpu_worker.py`: warm-up would run the largest steps on a CPU, too.
- `refusals.py`: Ray has one executor.

`seams.py` compares everything else by signature and code.
"""

import importlib
import re

from vllm_specinfer.flags import ANY_VLLM_ENV, is_on

SUPPORTED = ("0.32", "0.33")

# vLLM names that the package replaces, subclasses, fills in or asks: module:attribute.
REQUIRED = (
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    "vllm.config.speculative:SpeculativeConfig.create_draft_parallel_config",
    "vllm.config.speculative:SpeculativeConfig.draft_load_config",
    "vllm.config.speculative:SpeculativeConfig.max_num_new_slots_for_drafting",
    "vllm.config.speculative:SpeculativeConfig.uses_draft_model",
    "vllm.config.speculative:SpeculativeConfig.update_arch_",
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
    "vllm.config.vllm:HAS_TRITON",
    "vllm.config.vllm:VllmConfig.use_v2_model_runner",
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens",
    "vllm.model_executor.models.registry:_SPECULATIVE_DECODING_MODELS",
    "vllm.sampling_params:SamplingParams._validate_spec_decode",
    "vllm.utils.torch_utils:resolve_kv_cache_dtype_string",
    "vllm.triton_utils.dispatcher:register_kernels",
    "vllm.v1.attention.backends.registry:register_backend",
    "vllm.v1.core.block_pool:BlockPool.free_blocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
    ".allocate_new_blocks",
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
    "vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids_in_output",
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats",
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
    "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
    "vllm.v1.outputs:AsyncModelRunnerOutput.get_output",
    "vllm.v1.structured_output:StructuredOutputManager._get_constraint_bounds",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.fill_bitmask",
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar.rollback",
)
# Checked by the worker alone: on a CPU these must not be imported before its hooks.
REQUIRED_IN_WORKER = (
    "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.cleanup",
    "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator.broadcast",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.v1.worker.gpu.block_table:BlockTables.append_block_ids",
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.__init__",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.load_draft_model",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.set_attn",
    "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.propose",
    "vllm.v1.worker.gpu.spec_decode.eagle.utils:load_eagle_model",
    "vllm.v1.worker.gpu.attn_utils:init_attn_backend",
    "vllm.v1.worker.gpu.model_states:resolve_model_state_cls",
    "vllm.v1.worker.gpu.model_states.interface:ModelSpecificAttnMetadata",
    "vllm.v1.worker.gpu.model_states.interface:ModelState.custom_sampler",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_inputs",
)


def release(version: str) -> str | None:
    """The one of `SUPPORTED` that a version of vLLM belongs to, None for others."""
    match = re.match(r"(\d+\.\d+)\.", version)
    return match.group(1) if match and match.group(1) in SUPPORTED else None


def unsupported_reason(required: tuple[str, ...] = REQUIRED) -> str | None:
    """Why the installed vLLM cannot run specinfer.

    Args:
        required: vLLM names that must exist.

    Returns:
        One sentence that names what is installed and what is supported, or None.
    """
    import vllm

    version = vllm.__version__
    if release(version) is None and not is_on(ANY_VLLM_ENV):
        supported = " or ".join(f"{known}.x" for known in SUPPORTED)
        return (
            f"vLLM must be {supported} for method specinfer, or {ANY_VLLM_ENV}=1 must "
            f"be set to try another one; got {version}"
        )
    for name in required:
        if not _exists(name):
            return (
                f"vLLM must have {name.replace(':', '.')} for method specinfer; got "
                f"{version} without it"
            )
    return None


def _exists(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        value = importlib.import_module(module)
    except ImportError:
        return False
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True
