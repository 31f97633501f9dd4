"""Drafting by the host, once it knows what the step before has brought.

It waits for that. Steps that need not wait are `drafting/ahead_steps.py`'s.

Dimension legend: S request slots, B requests of the batch, N nodes per tree.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.states import RequestState

from vllm_specinfer.device import read, stage, token_rows
from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.sources import Decision, SourceSet
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.budget_memory import BudgetMemory
from vllm_specinfer.scheduling.step_stats import DRAFT, WorkerStats
from vllm_specinfer.tree.table import TreeTable


@dataclass(frozen=True)
class DraftRequest:
    """What `propose` was asked."""

    input_batch: InputBatch
    num_sampled: torch.Tensor
    states: torch.Tensor | None
    num_nodes: int | None
    decided: Decision | None


class HostSteps:
    """Asks the sources, writes trees.

    Attributes:
        parents: Of the trees of the last batch, by request id; none where the host has
            not drafted them.
        num_computed: [S] tokens of each slot whose K/V the last step has left.
        num_tokens: [S] tokens of each slot that it has left.
    """

    def __init__(
        self,
        requests: RequestState,
        sampling: SamplingStates,
        trees: TreeTable,
        sources: SourceSet,
        budget: Budget,
        memory: BudgetMemory | None,
        names: Sequence[str],
        tests_draws: bool,
    ) -> None:
        """Draft nothing yet.

        Args:
            requests: The runner's.
            sampling: vLLM's sampling parameters of all slots.
            trees: Where trees are written.
            sources: Who is asked.
            budget: Theirs.
            memory: Keeps what is learned; None where nothing is.
            names: Of the sources.
            tests_draws: As `DraftStep.tests_draws`.
        """
        self._requests, self._sampling = requests, sampling
        self._trees, self._sources = trees, sources
        self._budget, self._memory = budget, memory
        self._names, self._tests_draws = names, tests_draws
        self.parents: dict[str, list[int]] = {}
        self.num_computed, self.num_tokens = np.zeros(
            (2, requests.max_num_reqs), np.int64
        )
        # By slot: the tokens that end its request; then nobody runs a tree.
        self._stops: dict[int, set[int | None]] = {}
        # By slot: the accepted nodes of its last tree, and what was counted with it.
        self._accepted: dict[int, tuple[WorkerStats, list[int]]] = {}
        self._finished_at = 0.0
        # Nothing has been launched ahead since then.
        self._trusts_clock = True
        # Since the last step a request has started: the engine may have been idle.
        self._started = False

    @property
    def sizes(self) -> dict[str, int]:
        """As `AheadSteps.sizes`."""
        return {req_id: len(parents) for req_id, parents in self.parents.items()}

    def start(self, slot: int, params: SamplingParams) -> None:
        """A request starts in a slot."""
        self._started = True
        self.num_tokens[slot] = 0
        self._stops[slot] = {params.eos_token_id, *(params.stop_token_ids or ())}

    def stop(self) -> None:
        """The device has drafted for this step."""
        self.parents, self._trusts_clock = {}, False
        self._note_step()

    def _note_step(self) -> None:
        if self._memory is not None:
            self._memory.note_step()

    def note_accepted(self, slot: int, nodes: list[int], stats: WorkerStats) -> None:
        """Of a tree that has been verified.

        Args:
            slot: Its request's.
            nodes: The accepted ones, by depth.
            stats: Of the step that has verified it.
        """
        self._accepted[slot] = stats, nodes

    def draft(
        self, asked: DraftRequest, verified: WorkerStats, stats: WorkerStats
    ) -> torch.Tensor:
        """Grow trees.

        Args:
            asked: For whom.
            verified: Of the step that has been verified last.
            stats: Of the next step.

        Returns:
            [B, n] int64 node tokens in flat order, for the n nodes that were asked for.
        """
        started = time.perf_counter()
        input_batch = asked.input_batch
        step, decodes_only = self._step(asked, verified)
        if decodes_only:
            seconds = time.perf_counter() - self._finished_at
            num_rows = input_batch.num_tokens
            trees = num_rows > input_batch.num_reqs
            self._budget.observe_step(num_rows, seconds, trees)
            self._note_step()
        proposed_at = time.perf_counter()
        self._trees.drop(step.slots)
        trees, draws, counts, reasons, work = self._sources.propose(
            step, asked.num_nodes, asked.decided
        )
        # Where a tree ends, tokens that exist: vLLM's warm-up runs all N.
        drafts = np.zeros((input_batch.num_reqs, self._trees.num_nodes), np.int64)
        drafts[step.growing] = np.maximum(trees.tokens, 0)
        growing = [input_batch.req_ids[i] for i in step.growing.tolist()]
        self.parents = {
            req_id: tree.parents.tolist()
            for req_id, tree in zip(growing, trees.each(), strict=True)
        }
        self._trees.write(step.slots[step.growing], trees, step.roots.roots, draws)
        stats.reasons = {growing[r]: why for r, why in reasons.items()}
        stats.drafted.update(dict(zip(self._names, counts, strict=False)))
        self._finished_at = time.perf_counter()
        stats.seconds[DRAFT] += self._finished_at - started
        # The host's own work is part of it: of many requests it is no little.
        seconds = self._finished_at - proposed_at
        if work is not None and growing:
            self._budget.observe_draft(len(growing), *work, seconds)
        elif work is not None and not step.ended:
            self._budget.observe_prompts(input_batch.num_reqs, seconds)
        return stage(self._requests.device, drafts)[0][:, : asked.num_nodes]

    def _step(
        self, asked: DraftRequest, verified: WorkerStats
    ) -> tuple[DraftStep, bool]:
        """What sources are told, and whether the step was one of decoding.

        That is, no request of the batch is inside its prompt or just started.
        """
        input_batch, states = asked.input_batch, asked.states
        requests, slots = self._requests, input_batch.idx_mapping_np
        total, computed, sampled, positions = read(
            requests.total_len.gpu,
            requests.num_computed_tokens.gpu,
            asked.num_sampled,
            input_batch.positions,
        )
        self.num_tokens = total.astype(np.int64)
        total = self.num_tokens[slots]
        self.num_computed = computed.astype(np.int64)
        computed = self.num_computed[slots]
        num_tokens = np.minimum(total, computed + 1)
        # A prompt brings one token more.
        goes_on = total + (sampled == 0) < requests.max_seq_len[slots]
        texts = token_rows(requests.all_token_ids)
        for i in ((sampled > 0) & goes_on).nonzero()[0].tolist():
            new = texts[slots[i], total[i] - sampled[i] : total[i]].tolist()
            goes_on[i] = self._stops[slots[i]].isdisjoint(new)
        (growing,) = ((sampled > 0) & goes_on).nonzero()
        known, self._trusts_clock = self._trusts_clock, True
        started, self._started = self._started, False
        state_starts = None
        if states is not None:
            starts = input_batch.query_start_loc_np[: len(slots)]
            counts = computed - positions[starts]
            rows = self._rows_that_stay(slots, starts, counts, verified)
            state_starts = np.concatenate([[0], np.cumsum(counts)])
            states = states[stage(requests.device, rows)[0]]
        decodes_only = (
            known
            and not started
            and (sampled > 0).all()
            and input_batch.num_tokens <= len(slots) * (self._trees.num_nodes + 1)
        )
        step = DraftStep(
            slots=slots,
            num_tokens=num_tokens,
            growing=growing,
            roots=DraftRows.of_roots(
                self._sampling, slots[growing], num_tokens[growing] - 1
            ),
            all_token_ids=texts,
            tests_draws=self._tests_draws,
            states=states,
            state_starts=state_starts,
            ended=not goes_on.any(),
        )
        return step, decodes_only

    def _rows_that_stay(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        verified: WorkerStats,
    ) -> np.ndarray:
        """Rows of the target's pass whose tokens are in the text, in its order.

        Args:
            slots: [B] request slots.
            starts: [B] first row of each request.
            counts: [B] how many of its tokens the pass computed and kept.
            verified: Of that pass.
        """
        rows = []
        for slot, start, count in zip(slots.tolist(), starts, counts, strict=True):
            of_step, path = self._accepted.pop(slot, (None, None))
            if of_step is not verified:
                path = range(count - 1)
            rows.append(start + np.array([0, *(node + 1 for node in path)]))
        return np.concatenate(rows)
