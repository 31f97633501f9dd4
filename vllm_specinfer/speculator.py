"""The speculator of vLLM's runner: ask the sources, write trees.

The runner asks for drafts while the step's output waits to be sent. Trees are grown
after that, when the engine fetches the drafts (`TreeWorker.take_draft_token_ids`), so
that no client waits for them.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from vllm_specinfer.device import Once, read, stage, token_rows
from vllm_specinfer.drafting.blocks import BlockIds
from vllm_specinfer.drafting.graphs import most_requests
from vllm_specinfer.drafting.rows import root_rows
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.sources import Decision, SourceSet
from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.loading import load_sources, recalled, row_sizes
from vllm_specinfer.model_state import TreeModelState, Walked
from vllm_specinfer.options import TESTS_DRAWS
from vllm_specinfer.ranks import of_first_rank
from vllm_specinfer.scheduling.budget import Budget, LoadBudget
from vllm_specinfer.scheduling.lessons import Lessons
from vllm_specinfer.scheduling.memory import BudgetMemory
from vllm_specinfer.scheduling.step_stats import DRAFT, WorkerStats
from vllm_specinfer.tree.device_plan import DevicePlan
from vllm_specinfer.tree.table import TreeTable
from vllm_specinfer.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from vllm_specinfer.drafting.ahead_steps import AheadSteps


@dataclass(frozen=True)
class DraftRequest:
    """What `propose` was asked."""

    input_batch: InputBatch
    num_sampled: torch.Tensor
    states: torch.Tensor | None
    num_nodes: int | None
    decided: Decision | None


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
        self._tests_draws = self.speculative_config.verification_rule in TESTS_DRAWS
        self.budget = Budget()
        self.sources: SourceSet | None = None
        self._names = self.speculative_config.source_names
        # Whether an EAGLE head reads the target's states, and those of several layers.
        self._reads_states = self.speculative_config.reads_states
        self._reads_layers = self.speculative_config.reads_layers
        self._asked: DraftRequest | None = None
        self._captures = False
        self._finished_at = 0.0
        # Nothing has been launched ahead since then.
        self._trusts_clock = True
        # What the SSMs' part of the last made-up pass took.
        self.dummy_seconds = 0.0
        # Since the last step a request has started: the engine may have been idle.
        self._started = False
        self._memory: BudgetMemory | None = None
        # By slot: the accepted nodes of its last tree, and what was counted with it.
        self._accepted: dict[int, tuple[WorkerStats, list[int]]] = {}
        self._model_state: TreeModelState | None = None
        # The trees of the last batch by request id, where the host has drafted them.
        self.trees: dict[str, TokenTree] = {}
        self._ahead: AheadSteps | None = None
        self._lessons = Lessons()
        # [S] tokens of each slot whose K/V the last step has left.
        self.num_computed = np.zeros(self.max_num_reqs, np.int64)
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
        from vllm_specinfer.drafting.device_trees import Texts
        from vllm_specinfer.drafting.text_copies import TextCopies

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
            self._memory = recalled(self.vllm_config, self.sources)
        layers = self.vllm_config.compilation_config.static_forward_context
        state = functools.partial(
            TreeModelState,
            trees=self._trees,
            drafter=self,
            verification=self.speculative_config.verification_rule,
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
            source.bind(kv_cache_config, block_tables) for source in self.sources.ssms
        ]
        self.attn_groups = [sum(groups, []) for groups in zip(*bound, strict=True)]

    def drop_graphs(self) -> None:
        """Forget what was captured: vLLM's profiling captures over a KV cache, too."""
        self._ahead = None
        self.sources.drop_graphs()

    def add_blocks(self, slot: int, block_ids: BlockIds) -> None:
        """The request in this slot gets blocks, of each KV cache group."""
        for source in self.sources.ssms:
            source.ssm.kv.add_blocks(slot, block_ids)

    def start_request(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self._started = True
        if self._ahead is not None:
            self._ahead.start(slot, request)
        self.sources.start(slot, request)

    def end_request(self, req_id: str) -> None:
        """A request has ended."""
        slot = self._req_states.req_id_to_index.get(req_id)
        if self._ahead is not None and slot is not None:
            self._ahead.leave(slot)

    def plan_ahead(self, input_batch: InputBatch) -> DevicePlan | None:
        """As `AheadSteps.plan`."""
        return self._ahead and self._ahead.plan(input_batch)

    def on_verified(self, walks: Callable[[], list[Walked]]) -> Callable[[], None]:
        """A step has been verified.

        Args:
            walks: Waits for what was accepted.

        Returns:
            Counts that; on another thread, perhaps.
        """
        stats, trees = self._verifying, self._ahead and self._ahead.trees
        sources_of = (trees or self.sources).sources_of_nodes()
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
            self._accepted[walked.slot] = stats, walked.nodes
            self.sources.observe(walked.slot, walked.nodes)

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
            states, decided = None, None
            if self._reads_layers:
                states = torch.cat(aux_hidden_states, dim=-1)
            elif self._reads_states:
                states = last_hidden_states
            if self._ahead is not None and self._ahead.takes(input_batch):
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
    def is_asked(self) -> bool:
        """`draft` has something to do."""
        return self._asked is not None

    def _draft_ahead(
        self,
        input_batch: InputBatch,
        num_sampled: torch.Tensor,
        states: torch.Tensor | None,
        most: int | None,
    ) -> torch.Tensor | Decision:
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
            self.trees, self._trusts_clock = {}, False
            self._note_step()
            self._drafting.seconds[DRAFT] += time.perf_counter() - started
        return found

    @property
    def num_nodes(self) -> dict[str, int]:
        """Rows that the trees of the last batch have below their roots, by request id;
        the other requests have none."""
        if self._ahead is not None and self._ahead.sizes is not None:
            return self._ahead.sizes
        return {req_id: len(tree.parents) for req_id, tree in self.trees.items()}

    def parents(self) -> dict[str, list[int]]:
        """Of the drafts that have rows, by request; waits for them."""
        if self._ahead is not None and self._ahead.trees is not None:
            return self._ahead.trees.parents()
        return {req_id: tree.parents.tolist() for req_id, tree in self.trees.items()}

    @property
    def knows_texts(self) -> bool:
        """`num_computed` is of the last step."""
        return self._ahead is None or self._ahead.sizes is None

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
        started = time.perf_counter()
        input_batch = asked.input_batch
        drafts = np.zeros((input_batch.num_reqs, self.num_speculative_steps), np.int64)
        step = self._step(input_batch, asked.num_sampled, asked.states)
        if step.decodes_only:
            seconds = time.perf_counter() - self._finished_at
            num_rows = input_batch.num_tokens
            trees = num_rows > input_batch.num_reqs
            self.budget.observe_step(num_rows, seconds, trees)
            self._note_step()
        self._trees.drop(step.slots)
        trees, draws, counts, reasons = self.sources.propose(
            step, asked.num_nodes, asked.decided
        )
        # Where a tree ends, tokens that exist: vLLM's warm-up runs all N.
        drafts[step.growing] = np.maximum(trees.tokens, 0)
        growing = [input_batch.req_ids[i] for i in step.growing.tolist()]
        self.trees = dict(zip(growing, trees.each(), strict=True))
        self._trees.write(
            step.slots[step.growing],
            trees.tokens,
            trees.parents,
            step.roots.roots,
            draws,
        )
        self._drafting.reasons = {growing[r]: why for r, why in reasons.items()}
        self._drafting.drafted.update(dict(zip(self._names, counts, strict=False)))
        self._finished_at = time.perf_counter()
        self._drafting.seconds[DRAFT] += self._finished_at - started
        return input_batch, stage(self.device, drafts)[0][:, : asked.num_nodes]

    def _note_step(self) -> None:
        if self._memory is not None:
            self._memory.note_step()

    def _step(
        self,
        input_batch: InputBatch,
        num_sampled: torch.Tensor,
        states: torch.Tensor | None,
    ) -> DraftStep:
        requests, slots = self._req_states, input_batch.idx_mapping_np
        total, computed, sampled, positions = read(
            requests.total_len.gpu,
            requests.num_computed_tokens.gpu,
            num_sampled,
            input_batch.positions,
        )
        total = total[slots].astype(np.int64)
        self.num_computed = computed.astype(np.int64)
        computed = self.num_computed[slots]
        num_tokens = np.minimum(total, computed + 1)
        (growing,) = (sampled > 0).nonzero()
        known, self._trusts_clock = self._trusts_clock, True
        started, self._started = self._started, False
        state_starts = None
        if states is not None:
            starts = input_batch.query_start_loc_np[: len(slots)]
            counts = computed - positions[starts]
            rows = self._rows_that_stay(slots, starts, counts)
            state_starts = np.concatenate([[0], np.cumsum(counts)])
            states = states[stage(self.device, rows)[0]]
        return DraftStep(
            slots=slots,
            num_tokens=num_tokens,
            growing=growing,
            roots=root_rows(
                self._sampler.sampling_states, slots[growing], num_tokens[growing] - 1
            ),
            all_token_ids=token_rows(requests.all_token_ids),
            decodes_only=known
            and not started
            and len(growing) == len(slots)
            and input_batch.num_tokens <= len(slots) * (self.num_speculative_steps + 1),
            tests_draws=self._tests_draws,
            states=states,
            state_starts=state_starts,
        )

    def _rows_that_stay(
        self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray
    ) -> np.ndarray:
        """Rows of the target's pass whose tokens are in the text, in its order.

        Args:
            slots: [B] request slots.
            starts: [B] first row of each request.
            counts: [B] how many of its tokens the pass computed and kept.
        """
        rows = []
        for slot, start, count in zip(slots.tolist(), starts, counts, strict=True):
            of_step, path = self._accepted.pop(slot, (None, None))
            if of_step is not self._verifying:
                path = range(count - 1)
            rows.append(start + np.array([0, *(node + 1 for node in path)]))
        return np.concatenate(rows)
