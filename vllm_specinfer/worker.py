"""What specinfer adds to a worker: where the speculator enters vLLM's runner."""

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput
from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers
from vllm.v1.worker.gpu.warmup import warmup_kernels
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.workspace import use_workspace_lane

from vllm_specinfer import model_refusals, refusals
from vllm_specinfer.device import is_host, write_rows
from vllm_specinfer.scheduling import blocks, invariants
from vllm_specinfer.scheduling.draft_trees import DraftTrees
from vllm_specinfer.scheduling.step_stats import WorkerStats
from vllm_specinfer.shared_kv import let_groups_know
from vllm_specinfer.tree.token_tree import num_words

# Below vLLM's logger: that is the one with a handler for information.
logger = init_logger(f"vllm.{__name__}")


class TreeOutput(AsyncModelRunnerOutput):
    """A step's output with what was counted of its trees."""

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        counts: Sequence[Callable[[], None]],
        stats: WorkerStats,
    ) -> None:
        """Wait for nothing yet.

        Args:
            output: The runner's.
            counts: Complete the numbers, one after the other.
            stats: The numbers.
        """
        self._output = output
        self._counts = counts
        self._stats = stats

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens and the walks."""
        output = self._output.get_output()
        for count in self._counts:
            count()
        output.tree_stats = self._stats
        return output

    def get_kv_connector_output(self) -> Any:
        """What vLLM 0.33 wants to keep of a step that has failed."""
        return self._output.get_kv_connector_output()


def _remove_hooks(models: weakref.WeakSet[TorchCompileWithNoGuardsWrapper]) -> None:
    """Torch's, which hold compiled models."""
    for model in models:
        model.cleanup()


class TreeWorker(Worker):
    """Put before one of vLLM's workers: tree attention, tree drafting, statistics.

    On a CPU vLLM's worker for CPUs must be imported before this module: it mends
    torch's interface to accelerators, which vLLM's GPU worker reads at import.
    """

    def register_attention(self) -> None:
        """Make attention layers built from now on able to run trees."""
        raise NotImplementedError

    @property
    def attention_summary(self) -> str:
        """Which tree attention runs, for the log."""
        raise NotImplementedError

    def init_device(self) -> None:
        """Build the runner, then put the tree speculator into it."""
        from vllm_specinfer.lora import TreeLoraState
        from vllm_specinfer.speculator import TreeSpeculator

        refusals.check_vllm_config(self.vllm_config)
        # Before the model is built: vLLM caches the backend per process.
        self.register_attention()
        super().init_device()
        runner = self.model_runner
        self._let_groups_know()
        if not is_host(self.device):
            self._profile_verification()
        runner.speculator = TreeSpeculator(
            self.vllm_config, self.device, runner.req_states, self._capture_any_rows
        )
        runner.lora_state = TreeLoraState(
            runner.max_num_reqs, lambda: runner.model_state.num_logits
        )
        # Before the target is loaded: it is compiled with these outputs or without.
        runner.use_aux_hidden_state_outputs = (
            self.vllm_config.speculative_config.reads_layers
        )

    def _let_groups_know(self) -> None:
        """Of layers that share K/V, whenever a KV cache begins.

        On CUDA there is one before the worker's, to find out what graphs take
        (vllm/v1/worker/gpu/cudagraph_utils.py).
        """
        initialize = self.model_runner.initialize_kv_cache

        def with_shared(config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
            let_groups_know(config, get_shared_kv_cache_layers(self.vllm_config))
            initialize(config, *args, **kwargs)

        self.model_runner.initialize_kv_cache = with_shared

    def _profile_verification(self) -> None:
        """Let vLLM's profile of memory see as many rows of logits as a step may have.

        Its own has one per request; a step of full trees, of the warm-up already, has
        several times as many (vllm/v1/worker/gpu/model_runner.py: profile_run).
        """
        runner = self.model_runner
        sample = runner._dummy_sampler_run

        def with_trees(hidden_states: torch.Tensor) -> None:
            sample(hidden_states)
            most = runner.max_num_reqs * runner.decode_query_len
            num_rows, width = min(most, runner.max_num_tokens), hidden_states.shape[1]
            logits = runner.model.compute_logits(
                hidden_states.new_zeros(num_rows, width)
            )
            runner.model_state.sampler.profile(logits)

        runner._dummy_sampler_run = with_trees

    def _capture_any_rows(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Capture verification for requests with any number of rows up to a tree's.

        vLLM does that for adaptive verification; else every request must have N + 1
        rows, and the budget gives fewer (vllm/v1/worker/gpu/cudagraph_utils.py).
        """
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

        runner = self.model_runner
        runner.cudagraph_manager = ModelCudaGraphManager(
            self.vllm_config,
            self.device,
            cudagraph_mode,
            decode_query_len=runner.decode_query_len,
            lora_capture_cases=runner.lora_capture_cases,
            varlen_decode=True,
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load target and SSM, then refuse layers that cannot run trees."""
        super().load_model(*args, **kwargs)
        self._let_models_go()
        layers = self.vllm_config.compilation_config.static_forward_context
        num_nodes = self.vllm_config.speculative_config.num_speculative_tokens
        words = num_words(1 + num_nodes)
        words_of_ssms = self.model_runner.speculator.sources.words_of_layers()
        reason = model_refusals.layer_reason(layers.items(), words, words_of_ssms)
        refusals.refuse(reason)
        for layer in layers.values():
            # What a layer attends by is its implementation's. vLLM would give blocks
            # behind a window to others; the block table is the SSMs', too.
            if getattr(layer, "sliding_window", None) is not None:
                layer.sliding_window = None
        logger.info_once(
            "specinfer: %s; tree attention %s",
            self.vllm_config.speculative_config.summary,
            self.attention_summary,
            scope="global",
        )

    def _let_models_go(self) -> None:
        """When this ends or is shut down, nothing of torch's holds target and SSMs.

        vLLM sees to the target alone, and not after a shutdown
        (vllm/v1/engine/llm_engine.py: _cleanup_instance_caches).
        """
        models = self.model_runner.model, self.model_runner.speculator.model
        compiled = weakref.WeakSet(
            module
            for model in models
            for module in model.modules()
            if isinstance(module, TorchCompileWithNoGuardsWrapper)
        )
        self._remove_hooks = weakref.finalize(self, _remove_hooks, compiled)

    def determine_available_memory(self) -> int:
        """Keep nothing of what was captured meanwhile."""
        available = super().determine_available_memory()
        self.model_runner.speculator.drop_graphs()
        if not is_host(self.device):
            gc.collect()  # graphs and what they launch hold each other
            torch.accelerator.empty_cache()
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Learn nothing from steps that compile kernels, over texts of nobody."""
        speculator = self.model_runner.speculator
        with speculator.sources.unlearned():
            compiled = super().compile_or_warm_up_model()
            speculator.learn()
        return compiled

    def _maybe_activate_jit_monitor(self) -> None:
        """Warm up once more before vLLM reports what compiles from now on."""
        if self.vllm_config.kernel_config.enable_jit_warmup:
            if self.model_runner.speculator.drafts_ahead:
                self._warm_up_drafting()
            self._warm_up_draws()
        super()._maybe_activate_jit_monitor()

    def _warm_up_drafting(self) -> None:
        """As vLLM did before there were graphs, whose trees other kernels verify.

        Seeds are as before: the made-up requests drew some
        (vllm/v1/worker/gpu_worker.py).
        """
        warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
        parallel = self.vllm_config.parallel_config
        set_random_seed(
            self.vllm_config.model_config.seed, parallel.data_parallel_index
        )

    @torch.inference_mode()
    def _warm_up_draws(self) -> None:
        """By temperature alone, of logits as the target gives them."""
        runner, config = self.model_runner, self.vllm_config.model_config
        shape = 2, config.get_hidden_size()
        hidden = torch.zeros(shape, dtype=config.dtype, device=self.device)
        runner.model_state.sampler.bare_draws.warm_up(
            runner.model.compute_logits(hidden)
        )

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """vLLM tells a head nothing of new weights that it shares."""
        super().reload_weights(*args, **kwargs)
        self.copy_weights_again()

    def finish_weight_update(self) -> None:
        """As `reload_weights`."""
        super().finish_weight_update()
        self.copy_weights_again()

    def copy_weights_again(self) -> None:
        """Wherever there are copies of the target's, which are others by now."""
        of_target = set(self.model_runner.get_model().modules())
        for source in self.model_runner.speculator.sources.ssms:
            if getattr(source.ssm.model, "lm_head", None) in of_target:
                source.ssm.head.copy_again()

    def supports_draft_weight_updates(self) -> bool:
        """No: vLLM would load one model, and knows nothing of reduced heads.

        vllm/v1/worker/gpu_worker.py: _set_draft_weight_update_target.
        """
        return False

    def start_draft_weight_update(self) -> None:
        """Refused before anything is taken apart.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "weight updates must be the target's with method specinfer; got "
            "start_draft_weight_update"
        )

    def shutdown(self) -> None:
        """With the verifier, which vLLM keeps: it holds models and captured graphs.

        Graphs must go before the communicators that they use
        (vllm/distributed/device_communicators/pynccl.py).
        """
        if (runner := getattr(self, "model_runner", None)) is not None:
            runner.rejection_sampler = None
        if (remove_hooks := getattr(self, "_remove_hooks", None)) is not None:
            remove_hooks()
        super().shutdown()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """The KV cache, if it slept, has woken up empty."""
        super().wake_up(tags)
        if tags is None or "kv_cache" in tags:
            self.model_runner.speculator.sources.lose_kv()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """Run the target; first, blocks that trees gave back leave the tables.

        And drafts that nobody has fetched are made: vLLM's warm-up fetches none, and
        with asynchronous scheduling the step is there before the last one's output.
        """
        self._draft()
        self.model_runner.speculator.finished = scheduler_output.finished_req_ids
        if self.vllm_config.scheduler_config.async_scheduling:
            scheduler_output = self._as_known(scheduler_output)
        tables = self.model_runner.block_tables
        slots = self.model_runner.req_states.req_id_to_index
        if kept := getattr(scheduler_output, "kept_blocks", None):
            blocks.shorten(tables, slots, kept)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new is not None:
                self.model_runner.speculator.add_blocks(slots[req_id], new)
        output = super().execute_model(scheduler_output)
        expected = getattr(scheduler_output, "block_ids", {})
        invariants.check_tables(tables, slots, expected)
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Draft; as many nodes as each request's tree has rows, and their parents.

        The runner reports N tokens for every request, as placeholders unless a grammar
        wants to know them (vllm/v1/worker/gpu/spec_decode/utils.py).
        """
        self._draft()
        drafts = super().take_draft_token_ids()
        if drafts is None:
            return None
        of_requests = self.model_runner.speculator.parents()
        parents = [of_requests.get(req_id, []) for req_id in drafts.req_ids]
        tokens = zip(drafts.draft_token_ids, parents, strict=True)
        return DraftTrees(
            drafts.req_ids,
            [t[: len(p)] for t, p in tokens],
            parents,
        )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Verify; what was counted goes along with the step's output."""
        speculator = self.model_runner.speculator
        # Drafted before this step, also where none of the drafts had a row in it.
        stats, drafts = speculator.start_verification(), speculator.count_drafts
        output = super().sample_tokens(*args, **kwargs)
        if output is None:
            return None
        return TreeOutput(output, (self.model_runner.model_state.count, drafts), stats)

    def _as_known(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step that was scheduled before its trees were drafted.

        The scheduler has taken all nodes of the step before for accepted, and given
        every request rows for N more. Where the host has not heard of that step, it
        goes on with these numbers, as vLLM does.
        """
        speculator = self.model_runner.speculator
        slots = self.model_runner.req_states.req_id_to_index
        rows, drafts = dict(output.num_scheduled_tokens), {}
        num_nodes = speculator.num_nodes
        for req_id, placeholders in output.scheduled_spec_decode_tokens.items():
            kept = placeholders[: num_nodes.get(req_id, 0)]
            rows[req_id] -= len(placeholders) - len(kept)
            if kept:
                drafts[req_id] = kept
        known = copy.copy(output)
        known.num_scheduled_tokens = rows
        known.total_num_scheduled_tokens = sum(rows.values())
        known.scheduled_spec_decode_tokens = drafts
        if speculator.knows_texts:
            known.scheduled_cached_reqs = copy.copy(output.scheduled_cached_reqs)
            known.scheduled_cached_reqs.num_computed_tokens = [
                int(speculator.host_steps.num_computed[slots[req_id]])
                for req_id in output.scheduled_cached_reqs.req_ids
            ]
        return known

    def _draft(self) -> None:
        """Put the drafts where the runner puts what `propose` returns."""
        runner = self.model_runner
        if not runner.speculator.is_asked:
            return
        with use_workspace_lane(runner._draft_workspace_lane):
            batch, tokens = runner.speculator.draft()
        drafts, slots = runner.req_states.draft_tokens, batch.idx_mapping
        write_rows(drafts, slots, batch.idx_mapping_np, tokens)
        runner.draft_tokens_handler.set_draft_tokens(batch, tokens)
