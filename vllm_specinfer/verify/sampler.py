"""The rejection sampler of tree steps: verify, emit, commit.

Dimension legend: R requests of the batch, L logits rows of a step, V vocabulary, G
rows that are sampled at once: on a CPU one of each request whose walk goes on.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import read, stage
from vllm_specinfer.scheduling.step_stats import VERIFY
from vllm_specinfer.tree.proposals import stacked
from vllm_specinfer.tree.table import StepPlan
from vllm_specinfer.verify.bare_draws import BareDraws
from vllm_specinfer.verify.chains import Chains, last_row, looks_back
from vllm_specinfer.verify.logprobs import placed
from vllm_specinfer.verify.processed import ProcessedSampler, process
from vllm_specinfer.verify.stochastic import DrawsOfRows, DrawTestingSampler
from vllm_specinfer.verify.walk import TreeWalk

# Accepted rows of a step: batch index -> path, row i + 1 = node i.
Accepted = dict[int, list[int]]


class TreeSampler:
    """Stands where vLLM has its RejectionSampler (same call, same outputs).

    Called only when some request of the batch has drafts. The walk goes level by level:
    each request draws the next token of the row it stands at and moves on while a child
    holds that token. Requests without a live tree stop at their first row.

    The draw is vLLM's own, with the noise of plain decoding at that position: so a
    request emits what plain decoding emits, whatever its sampling parameters. Under
    "mss" and "rrs" a sampled request's draw is the outcome of the tests of the children
    drawn below that row, which has the same distribution.
    """

    # What tests draws, and what makes them where nothing else is asked.
    tester: type[DrawTestingSampler] = DrawTestingSampler
    drawer: type[BareDraws] = BareDraws
    # vLLM's warm-up reads it from whatever verifies drafts (gpu/warmup.py).
    enable_adaptive_verification = False

    def __init__(
        self,
        sampler: Sampler,
        plan_of: Callable[[InputBatch], StepPlan | None],
        positions: torch.Tensor,
        commit: Callable[[InputBatch, Accepted], None],
        on_time: Callable[[str, float], None],
        tests_draws: bool,
    ) -> None:
        """Wrap vLLM's sampler.

        Args:
            sampler: vLLM's sampler.
            plan_of: The tree layout of a batch, None where it has no live tree.
            positions: [max_num_tokens] int64, those of the step where it has a plan.
            commit: Moves the accepted rows' K/V to consecutive slots.
            on_time: Hears how many seconds a phase took.
            tests_draws: As `DraftStep.tests_draws`.
        """
        self.sampler = sampler
        self._plan_of = plan_of
        self._positions = positions
        self._commit = commit
        self._on_time = on_time
        self._tests = self.tester(sampler) if tests_draws else None
        self._processed = self._tests or ProcessedSampler(sampler)
        self.bare_draws = self.drawer(sampler, tests_draws)

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Verify one step.

        Args:
            logits: [L, V], rows root, node 0, node 1, ... of each request.
            input_batch: The step's batch.
            draft_logits: Unused.
            invalid_drafts: Unused: a grammar masks the rows of its tree.

        Returns:
            Accepted path and bonus token per request, in order.
        """
        started = time.perf_counter()
        plan = self._plan_of(input_batch)
        emitted: list[list[int]] = [[] for _ in range(input_batch.num_reqs)]
        walks: dict[int, TreeWalk] = {}
        if plan is not None:
            for i in plan.tree_requests:
                slot, nodes = plan.slots[i], plan.num_rows[i] - 1
                walks[i] = TreeWalk(
                    plan.table.tokens[slot, :nodes], plan.table.parents[slot, :nodes]
                )
        levels: list[tuple[Sequence[int], SamplerOutput]] = []
        standing: Sequence[int] = range(input_batch.num_reqs)
        slots, first = input_batch.idx_mapping_np, input_batch.cu_num_logits_np.tolist()
        positions = self._row_positions(input_batch, plan)
        only_draws = self.bare_draws.suffice(slots)
        while standing:
            paths = [walks[i].path if i in walks else [] for i in standing]
            if only_draws:
                pairs = zip(standing, paths, strict=True)
                rows = np.array([first[i] + last_row(path) for i, path in pairs])
                found = self.bare_draws.draw(
                    logits, input_batch, positions, slots[standing], rows
                )
            else:
                output = self._sample(logits, input_batch, plan, standing, paths)
                levels.append((standing, output))
                found = output.sampled_token_ids
            (sampled,) = read(found)
            tokens = sampled[:, 0].tolist()
            for i, token in zip(standing, tokens, strict=True):
                emitted[i].append(token)
            standing = [
                i
                for i, token in zip(standing, tokens, strict=True)
                if i in walks and walks[i].advance(token)
            ]
        if plan is not None:
            self._on_time(VERIFY, time.perf_counter() - started)
            self._commit(input_batch, {i: walk.path for i, walk in walks.items()})
        return self._output(input_batch, emitted, levels)

    def _sample(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        plan: StepPlan | None,
        requests: Sequence[int],
        paths: list[list[int]],
    ) -> SamplerOutput:
        """Sampling of some rows.

        Args:
            logits: [L, V].
            batch: The step's batch.
            plan: Its trees.
            requests: [G] batch indices.
            paths: [G] the rows from depth 1 down to each of them.

        Returns:
            [G, 1] tokens, and the logprobs of the G rows where a request wants some.
        """
        slots = batch.idx_mapping_np[requests]
        first = batch.cu_num_logits_np[requests]
        # Each is there once, whatever its rows: processors count by request.
        each = np.unique(requests)
        slot_of_each = batch.idx_mapping_np[each]
        which, mapping = stage(logits.device, each, slot_of_each)
        batch = replace(
            batch,
            num_reqs=len(each),
            idx_mapping=mapping,
            idx_mapping_np=slot_of_each,
            positions=self._row_positions(batch, plan),
            seq_lens=batch.seq_lens[which],
            seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[each],
        )
        chains = self._chains(plan, slots, first, paths, logits.device)
        counts, rows, before = chains.counts, chains.rows, chains.before
        view, logits = _with_rows(batch, slots, counts, rows, before), logits[rows]
        processed = process(self.sampler, logits, view)
        if (counts > 1).any():
            (last,) = stage(logits.device, np.cumsum(counts) - 1)
            logits, processed = logits[last], processed[last]
            counts, rows, before = np.ones_like(counts), rows[last], before[last]
            view = _with_rows(batch, slots, counts, rows, before)
        if self._tests is not None:
            self._tests.expect(*self._draws(plan, requests, paths), slots)
        self._processed.processed = processed
        return self._processed(logits, view)

    def _chains(
        self,
        plan: StepPlan | None,
        slots: np.ndarray,
        first: np.ndarray,
        paths: list[list[int]],
        device: torch.device,
    ) -> Chains:
        """What G rows look back at.

        Args:
            plan: The step's trees.
            slots: [G] request slots.
            first: [G] logits row of each root.
            paths: [G] as in `_sample`.
            device: Where the logits are.
        """
        return Chains.along(paths, first, looks_back(self.sampler, slots), device)

    def _row_positions(self, batch: InputBatch, plan: StepPlan | None) -> torch.Tensor:
        """Positions of a step's rows, which are also the places of their noise.

        Siblings share one.
        """
        return batch.positions if plan is None else self._positions

    def _draws(
        self,
        plan: StepPlan | None,
        requests: Sequence[int],
        paths: list[list[int]],
    ) -> tuple[np.ndarray, DrawsOfRows]:
        """What `DrawTestingSampler.expect` wants to know.

        Args:
            plan: The step's trees.
            requests: [G] batch indices.
            paths: [G] as in `_sample`.
        """
        draws = []
        if plan is not None:
            draws = [
                plan.draws(i, last_row(path))
                for i, path in zip(requests, paths, strict=True)
            ]
        there = [g for g, of_row in enumerate(draws) if of_row is not None]
        known = [draws[g] for g in there]
        return np.array(there, np.int64), lambda kept: stacked(
            [known[g] for g in kept.tolist()]
        )

    def _output(
        self,
        batch: InputBatch,
        emitted: list[list[int]],
        levels: list[tuple[Sequence[int], SamplerOutput]],
    ) -> SamplerOutput:
        """Put the levels' tokens and logprobs together by request."""
        counts = [len(tokens) for tokens in emitted]
        sampled = np.zeros((len(emitted), max(counts)), np.int64)
        for i, tokens in enumerate(emitted):
            sampled[i, : len(tokens)] = tokens
        tokens, num_tokens = stage(
            self._positions.device, sampled, np.array(counts, np.int32)
        )
        return self._emitted(
            batch,
            tokens,
            num_tokens,
            _joined_logprobs(counts, levels, tokens.device),
            _summed_nans(len(counts), levels),
        )

    def _emitted(
        self,
        batch: InputBatch,
        tokens: torch.Tensor,
        num_tokens: torch.Tensor,
        logprobs: LogprobsTensors | None,
        num_nans: torch.Tensor | None,
    ) -> SamplerOutput:
        """The step's output.

        Args:
            batch: The step's batch.
            tokens: [R, n] emitted tokens.
            num_tokens: [R] int32 how many they are.
            logprobs: Of the emitted tokens.
            num_nans: [R] in the logits of the emitted tokens, where they are counted.
        """
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_tokens,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def _with_rows(
    batch: InputBatch,
    slots: np.ndarray,
    counts: np.ndarray,
    rows: torch.Tensor,
    before: torch.Tensor,
) -> InputBatch:
    """A batch of these rows [n], so many of each slot [G]; `before` as of `Chains`."""
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    expanded, cu_num_logits = stage(rows.device, np.repeat(slots, counts), ends)
    return replace(
        batch,
        expanded_idx_mapping=expanded,
        expanded_local_pos=before,
        logits_indices=batch.logits_indices[rows],
        cu_num_logits=cu_num_logits,
        cu_num_logits_np=ends,
    )


def _summed_nans(
    num_reqs: int, levels: list[tuple[Sequence[int], SamplerOutput]]
) -> torch.Tensor | None:
    """[R] NaNs of all levels, where they are counted."""
    if not levels or levels[0][1].num_nans is None:
        return None
    total = levels[0][1].num_nans.new_zeros(num_reqs)
    for requests, output in levels:
        total[list(requests)] += output.num_nans
    return total


def _joined_logprobs(
    counts: list[int],
    levels: list[tuple[Sequence[int], SamplerOutput]],
    device: torch.device,
) -> LogprobsTensors | None:
    """The levels' logprobs, one row per emitted token, request by request.

    Args:
        counts: [R] emitted tokens per request.
        levels: Per level the requests and their rows; none where nothing but a draw
            was asked.
        device: Where they are.
    """
    if not levels:
        return None
    ends = np.concatenate([[0], np.cumsum(counts)])
    found = placed(
        int(ends[-1]),
        [
            (stage(device, ends[list(requests)] + depth)[0], output.logprobs_tensors)
            for depth, (requests, output) in enumerate(levels)
        ],
    )
    return found and found._replace(cu_num_generated_tokens=ends.tolist())
