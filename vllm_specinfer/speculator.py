"""The speculator of vLLM's runner, and who drafts which step: the host or the device.

The runner asks for drafts while the step's output waits to be sent. Trees are grown
after that, when the engine fetches the drafts (`TreeWorker.take_draft_token_ids`), so
that no client waits for them.
"""

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from vllm_specinfer.config import SpecInferConfig
from vllm_specinfer.device import Once, stage, token_rows
from vllm_specinfer.drafting.graphs import most_requests
from vllm_specinfer.drafting.host_blocks import BlockIds
from vllm_specinfer.drafting.host_steps import DraftRequest, HostSteps
from vllm_specinfer.drafting.lookup import NO_TOKENS
from vllm_specinfer.drafting.sources import Decision, SourceSet
from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.loading import load_sources, recalled, row_sizes
from vllm_specinfer.model_state import TreeModelState, Walked
from vllm_specinfer.options import TESTS_DRAWS
from vllm_specinfer.ranks import of_first_rank
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.budget_memory import BudgetMemory
from vllm_specinfer.scheduling.lessons import Lessons
from vllm_specinfer.scheduling.load_budget import LoadBudget
from vllm_specinfer.scheduling.step_stats import DRAFT, WorkerStats
from vllm_specinfer.tree.table import TreeTable

if TYPE_CHECKING:
    from vllm_specinfer.drafting.ahead_steps import AheadSteps
    from vllm_specinfer.tree.device_plan import DevicePlan


class TreeSpeculator(DraftModelSpeculator):
    """Proposes one token tree per request.

    Dimension legend: B requests of the batch, N nodes per tree.
    """

    speculative_config: SpecInferConfig

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
        capture_any_rows: Callable[[CUDAGraphMode], None],
    ) -> None:
        """Create the tree rows.

        Args:
            vllm_config: The engine's config; its speculative config is ours.
            device: The worker's device.
            req_states: The runner's request states.
            capture_any_rows: Has full graphs of verification take any tree.
        """
        super().__init__(vllm_config, device)
        self._capture_any_rows = capture_any_rows
        self._req_states = req_states
        self._sampler: Sampler | None = None
        self._trees = TreeTable(self.max_num_reqs, self.num_speculative_steps)
        options = self.speculative_config.options
        self._tests_draws = options.verification_rule in TESTS_DRAWS
        self.budget = Budget()
        self.sources: SourceSet | None = None
        self._names = self.speculative_config.source_names
        # Whether an EAGLE head reads the target's states, and those of several layers.
        self._reads_states = self.speculative_config.reads_states
        self._reads_layers = self.speculative_config.reads_layers
        self._asked: DraftRequest | None = None
        self._captures = False
        # Requests that have ended; others that leave their slots come again.
        self.finished: set[str] = set()
        # What the SSMs' part of the last made-up pass took.
        self.dummy_seconds = 0.0
        self._memory: BudgetMemory | None = None
        self._model_state: TreeModelState | None = None
        # Once the target is loaded.
        self.host_steps: HostSteps | None = None
        self._ahead: AheadSteps | None = None
        self._lessons = Lessons()
        # Of the step that is drafted for, and of the one that is verified.
        self._drafting, self._verifying = WorkerStats(), WorkerStats()

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Note whether drafting is to be captured; called again for each KV cache."""
        self._captures = cudagraph_mode.has_full_cudagraphs()
        if self._captures:
            self._capture_any_rows(cudagraph_mode)

    def capture(self) -> None:
        """Capture lookups and the passes of SSMs and heads, once the target's are."""
        if not self._captures:
            return
        # Their kernels need Triton.
        from vllm_specinfer.drafting.ahead import AheadDrafter, can_draft_ahead
        from vllm_specinfer.drafting.ahead_steps import AheadSteps
        from vllm_specinfer.drafting.text_copies import TextCopies, Texts

        requests, sources = self._req_states, self.sources
        texts = Texts(requests.all_token_ids.gpu, requests.total_len.gpu)
        window = 1 + sources.max_depth
        most_nodes = most_rows = 1
        if sources.ssms:
            most_nodes = max(source.most_nodes for source in sources.ssms)
            most_rows = max(window, most_nodes)
        num_reqs = most_requests(
            self.vllm_config.scheduler_config, most_nodes, most_rows
        )
        for source in sources.ssms:
            source.capture(texts, window, num_reqs)
        asynchronous = self.vllm_config.scheduler_config.async_scheduling
        if not asynchronous or not can_draft_ahead(sources):
            return
        if sources.lookups:
            copies = TextCopies(texts)
            for source in sources.lookups:
                source.capture(copies)
        drafter = AheadDrafter(
            *(sources, self.num_speculative_steps, texts, self.device),
            *(num_reqs, self.vllm_config, self._tests_draws),
        )
        self._ahead = AheadSteps(
            drafter,
            sources,
            self.budget,
            self._sampler,
            requests.num_computed_tokens.gpu,
            lambda: token_rows(requests.all_token_ids),
            self._names,
            self._lessons,
            self._tests_draws,
        )

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the SSMs and hook the target's model state.

        Args:
            target_model: The loaded target.
            target_attn_layer_names: Its attention layers.

        Returns:
            The SSMs.

        Raises:
            ValueError: The target brings a model state of its own.
        """
        if hasattr(target_model, "get_model_state_cls"):
            raise ValueError(
                "the target must use vLLM's default model state; got "
                f"{type(target_model).__name__} with its own"
            )
        if self.speculative_config.follows_load:
            sizes = row_sizes(self.vllm_config, target_model, self.device)
            self.budget = LoadBudget(self.num_speculative_steps, sizes, of_first_rank)
        self.sources = load_sources(
            self.vllm_config, target_model, self.device, self.budget
        )
        if self.budget.learns:
            self._memory = recalled(self.vllm_config, self.sources.experience)
        layers = self.vllm_config.compilation_config.static_forward_context
        state = functools.partial(
            TreeModelState,
            trees=self._trees,
            drafter=self,
            tests_draws=self._tests_draws,
            draft_layer_names=set(layers) - target_attn_layer_names,
        )
        # vLLM reads two class attributes of what it is about to construct.
        state.supports_prompt_embeds = TreeModelState.supports_prompt_embeds
        state.__name__ = TreeModelState.__name__
        target_model.get_model_state_cls = lambda: state
        return nn.ModuleList(source.ssm.model for source in self.sources.ssms)

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        target_input_buffers: InputBuffers,
        target_attn_groups: list[list[AttentionGroup]],
    ) -> None:
        """Bind the SSMs to the KV cache; may be called again.

        vLLM's own version builds all groups with one config; SSMs differ in theirs.
        """
        self._model_state = model_state
        self.drop_graphs()
        bound = [
            source.ssm.bind(kv_cache_config, block_tables)
            for source in self.sources.ssms
        ]
        self.attn_groups = [sum(groups, []) for groups in zip(*bound, strict=True)]

    def drop_graphs(self) -> None:
        """Forget what was captured: vLLM's profiling captures over a KV cache, too."""
        self._ahead = None
        self.sources.drop_graphs()

    def add_blocks(self, slot: int, block_ids: BlockIds) -> None:
        """The request in this slot gets blocks, of each KV cache group."""
        for source in self.sources.ssms:
            source.ssm.kv.append(slot, block_ids)

    def start_request(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self.host_steps.start(slot, request.sampling_params)
        if self._ahead is not None:
            self._ahead.start(slot, request)
        self.sources.start(slot, request)

    def end_request(self, req_id: str) -> None:
        """A request has ended, or leaves its slot to begin again with its text."""
        slot = self._req_states.req_id_to_index.get(req_id)
        if slot is None:
            return
        ended = req_id in self.finished
        if self._ahead is not None:
            self._ahead.leave(slot, ended)
            tokens = None
        else:
            tokens = token_rows(self._req_states.all_token_ids)[slot]
            tokens = tokens[: self.host_steps.num_tokens[slot]]
        self.sources.end(slot, tokens if ended else NO_TOKENS)

    def plan_ahead(self, input_batch: InputBatch) -> "DevicePlan | None":
        """`AheadSteps.plan`: None where a batch's trees are the host's, or none."""
        return self._ahead and self._ahead.plan(input_batch)

    def on_verified(self, walks: Callable[[], list[Walked]]) -> Callable[[], None]:
        """A step has been verified.

        Args:
            walks: Waits for what was accepted.

        Returns:
            Counts that; on another thread, perhaps.
        """
        stats, trees = self._verifying, self._ahead and self._ahead.trees
        sources_of = (trees or self.sources.experience).sources_of_nodes()
        self._lessons.add(lambda: self._learn(stats, walks()))

        def count() -> None:
            for req_id, slot, nodes, num_rows in walks():
                names = [self._names[q] for q in sources_of(slot, nodes)]
                stats.accepted[req_id] = names
                num_nodes = trees.num_nodes(slot) if trees else num_rows
                stats.num_nodes[req_id] = min(num_nodes, num_rows)

        return Once(count)

    def _learn(self, stats: WorkerStats, walks: list[Walked]) -> None:
        """What a step has accepted."""
        for walked in walks:
            self.host_steps.note_accepted(walked.slot, walked.nodes, stats)
            self.sources.experience.observe(*walked[1:])

    def learn(self) -> None:
        """Learn of all steps until now, however long it takes to hear of them."""
        self._lessons.learn()

    def on_time(self, phase: str, seconds: float) -> None:
        """A phase of verification has taken so long."""
        self._verifying.seconds[phase] += seconds

    @property
    def count_drafts(self) -> Callable[[], None]:
        """Counts what has been drafted ahead last, if anything has."""
        return (lambda: None) if self._ahead is None else self._ahead.count

    def start_verification(self) -> WorkerStats:
        """A step is verified: what is counted of it, to be read when it is over."""
        self._verifying, self._drafting = self._drafting, WorkerStats()
        return self._verifying

    def bind_sampler(self, sampler: Sampler) -> None:
        """vLLM's sampler is there."""
        self._sampler = sampler
        self.host_steps = HostSteps(
            self._req_states,
            sampler.sampling_states,
            self._trees,
            self.sources,
            self.budget,
            self._memory,
            self._names,
            self._tests_draws,
        )

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Note what `draft` is to do (vllm/v1/worker/gpu/spec_decode/speculator.py).

        Args:
            input_batch: The batch just verified.
            attn_metadata: Unused: the SSMs' own metadata is built here.
            slot_mappings: Unused.
            last_hidden_states: [rows, H] of the target; an EAGLE head reads them.
            aux_hidden_states: [rows, H] each, after some of the target's layers; an
                EAGLE-3 head reads them.
            num_sampled: [B] tokens emitted per request; 0 inside a prompt.
            num_rejected: Unused.
            *args: Unused.
            num_speculative_tokens: Most nodes of a tree in this step; None for N.
            dummy_run: Profiling or compilation; request slots must not be touched.
            **kwargs: Unused.

        Returns:
            [B, N] int64, as if nothing were drafted.
        """
        if dummy_run:
            n, started = input_batch.num_tokens, time.perf_counter()
            for source in self.sources.ssms:
                source.ssm.dummy_forward(
                    input_batch.input_ids[:n], input_batch.positions[:n]
                )
            self.dummy_seconds = time.perf_counter() - started
        else:
            self.sources.experience.forgive()
            states, decided = None, None
            if self._reads_layers:
                states = torch.cat(aux_hidden_states, dim=-1)
            elif self._reads_states:
                # Before they are read, a graph may be replayed that uses their memory.
                states = last_hidden_states.clone()
            if self._ahead is not None:
                found = self._draft_ahead(
                    input_batch, num_sampled, states, num_speculative_tokens
                )
                if isinstance(found, torch.Tensor):
                    return found
                decided = found
            self._asked = DraftRequest(
                input_batch, num_sampled, states, num_speculative_tokens, decided
            )
        shape = (input_batch.num_reqs, self.num_speculative_steps)
        return torch.zeros(shape, dtype=torch.int64, device=self.device)

    @property
    def drafts_ahead(self) -> bool:
        """Steps may be drafted for before the host knows what the last one brought."""
        return self._ahead is not None

    @property
    def is_asked(self) -> bool:
        """`draft` has something to do."""
        return self._asked is not None

    def _draft_ahead(
        self,
        input_batch: InputBatch,
        num_sampled: torch.Tensor,
        states: torch.Tensor | None,
        most: int | None,
    ) -> torch.Tensor | Decision | None:
        """As `AheadSteps.draft`."""
        started = time.perf_counter()
        most = self.num_speculative_steps if most is None else most
        if states is not None:
            first = input_batch.query_start_loc_np[: input_batch.num_reqs]
            last = input_batch.query_start_loc_np[1 : input_batch.num_reqs + 1] - 1
            roots = np.where(input_batch.is_prefilling_np, last, first)
            states = TargetStates(
                states,
                stage(self.device, roots)[0],
                self._model_state.path_of(input_batch),
            )
        found = self._ahead.draft(
            input_batch, num_sampled, states, most, self._drafting
        )
        if isinstance(found, torch.Tensor):
            self.host_steps.stop()
            self._drafting.seconds[DRAFT] += time.perf_counter() - started
        return found

    @property
    def knows_texts(self) -> bool:
        """The host has drafted for the last batch: it knows what that step brought."""
        return self._ahead is None or self._ahead.sizes is None

    @property
    def num_nodes(self) -> dict[str, int]:
        """Rows that the trees of the last batch have below their roots, by request id;
        the other requests have none."""
        return self.host_steps.sizes if self.knows_texts else self._ahead.sizes

    def parents(self) -> dict[str, list[int]]:
        """Of the drafts that have rows, by request; waits for them."""
        if self.knows_texts:
            return self.host_steps.parents
        trees = self._ahead.trees
        return {} if trees is None else trees.parents()

    @torch.inference_mode()
    def draft(self) -> tuple[InputBatch, torch.Tensor]:
        """Grow the trees that `propose` was asked for.

        Returns:
            The batch and [B, n] int64 node tokens in flat order, for the n nodes that
            were asked for.
        """
        asked, self._asked = self._asked, None
        self.learn()
        if self._ahead is not None:
            self._ahead.stop()
        tokens = self.host_steps.draft(asked, self._verifying, self._drafting)
        return asked.input_batch, tokens
