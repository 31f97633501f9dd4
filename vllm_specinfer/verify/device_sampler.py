"""Verification that does not wait for the device: all rows first, then the walk.

Dimension legend: R requests of the batch, L logits rows of a step, G rows of trees and
roots, N nodes per tree, V vocabulary.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import stage
from vllm_specinfer.kernels.triton.verification import verify_draws, walk_trees
from vllm_specinfer.scheduling.step_stats import VERIFY
from vllm_specinfer.tree.device_draws import TestedDraws
from vllm_specinfer.tree.device_plan import DevicePlan
from vllm_specinfer.tree.proposals import NO_DRAW, Draws
from vllm_specinfer.tree.table import StepPlan
from vllm_specinfer.verify.bare_draws import DeviceBareDraws
from vllm_specinfer.verify.chains import Chains, last_row, looks_back, needs_chain
from vllm_specinfer.verify.logprobs import placed, taken
from vllm_specinfer.verify.path_penalties import PathPenalties
from vllm_specinfer.verify.sampler import TreeSampler
from vllm_specinfer.verify.stochastic import (
    RESIDUAL_SALT,
    TEST_SALT,
    DrawsOfRows,
    DrawTestingSampler,
)

# Logits of rows that are sampled at once, as vLLM bounds them
# (vllm/v1/worker/gpu/spec_decode/rejection_sampler.py).
MAX_CHUNK_BYTES, FLOAT32_BYTES = 1 << 30, 4


class DeviceDrawTestingSampler(DrawTestingSampler):
    """Tests by a kernel."""

    def _tested(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        draws: Draws | TestedDraws,
        places: torch.Tensor,
        pos: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        device = logits.device
        if isinstance(draws, Draws):
            draws = TestedDraws(*stage(device, draws.places, draws.tokens, draws.q))
        (seeds,) = stage(device, self.sampling_states.seeds.np[self._slots[rows]])
        logits = logits.to(torch.float32, copy=True)
        positions = pos[places] + TEST_SALT
        found = verify_draws(
            logits, places, draws.tokens, draws.q, draws.places, seeds, positions
        )
        # Rows without draws take the target's own.
        return logits, found, RESIDUAL_SALT * (draws.places[:, 0] != NO_DRAW)


class DeviceTreeSampler(TreeSampler):
    """`TreeSampler` where the host is not the device.

    Every row of a tree gets its token, also those that the walk will not come to: rows
    are cheap there, waiting is not. One launch then walks down all trees, and their K/V
    is committed; what was accepted the host hears when it drafts or sends the tokens.
    """

    tester = DeviceDrawTestingSampler
    drawer = DeviceBareDraws

    def __init__(self, sampler: Sampler, *args: Any) -> None:
        """As `TreeSampler`; `commit` gets the rows [R, N] int32 that each request has
        accepted and how many they are [R] int32."""
        super().__init__(sampler, *args)
        self._penalties = PathPenalties(sampler.penalties_state)
        where = sampler.logits_processors.index(sampler.penalties_state)
        sampler.logits_processors[where] = self._penalties

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """As `TreeSampler`."""
        started = time.perf_counter()
        plan, num_reqs = self._plan_of(input_batch), input_batch.num_reqs
        if plan is None:
            return super().__call__(logits, input_batch)
        starts = plan.first_sampled
        requests = np.repeat(np.arange(num_reqs), plan.num_sampled)
        most = _most_rows(logits)
        if looks_back(self.sampler, plan.slots).any():
            most //= 1 + plan.max_depth  # rows of a chain
        if self._tests is not None:
            most //= 4  # their tests count in float64
        if isinstance(plan, DevicePlan) and plan.buffers.draws is not None:
            most = min(most, MAX_CHUNK_BYTES // plan.buffers.draws.bytes_per_row)
        most = max(1, most)
        chunks = [slice(i, i + most) for i in range(0, len(requests), most)]
        if self.bare_draws.suffice(plan.slots):
            rows = np.arange(len(requests)) - starts[requests]
            rows += input_batch.cu_num_logits_np[requests]
            slots = plan.slots[requests]
            positions = self._row_positions(input_batch, plan)
            draw = self.bare_draws.draw
            tokens = [
                draw(logits, input_batch, positions, slots[c], rows[c])[:, 0]
                for c in chunks
            ]
            found = num_nans = [None] * len(chunks)
        else:
            paths = [path for i in range(num_reqs) for path in plan.paths(i)]
            outputs = [
                self._of_rows(logits, input_batch, plan, requests[c], paths[c])
                for c in chunks
            ]
            tokens, found, num_nans = zip(*outputs, strict=True)
        targets, trees = _joined(tokens), plan.walked_trees(logits.device)
        path, count, emitted = walk_trees(targets, trees)
        self._on_time(VERIFY, time.perf_counter() - started)
        self._commit(input_batch, path, count)
        return self._emitted(
            input_batch,
            emitted,
            count + 1,
            _chosen(
                placed(len(targets), zip(chunks, found, strict=True)), trees.first, path
            ),
            _nans_on_path(num_nans, trees.first, path, count),
        )

    def profile(self, logits: torch.Tensor) -> None:
        """Take the memory of a step that has these logits [L, V]."""
        rows = logits[: _most_rows(logits)].clone()  # as a chunk gathers them
        self.bare_draws.warm_up(rows.to(torch.float32, copy=True))

    def _of_rows(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        plan: StepPlan,
        requests: np.ndarray,
        paths: list[list[int]],
    ) -> tuple[torch.Tensor, LogprobsTensors | None, torch.Tensor | None]:
        """[G] tokens of rows, their log probabilities and numbers of NaNs."""
        try:
            output = self._sample(logits, batch, plan, requests, paths)
        finally:
            self._penalties.paths = None
        tokens = output.sampled_token_ids[:, 0]
        return tokens, output.logprobs_tensors, output.num_nans

    def _chains(
        self,
        plan: StepPlan | DevicePlan | None,
        slots: np.ndarray,
        first: np.ndarray,
        paths: list[list[int]],
        device: torch.device,
    ) -> Chains:
        """As `TreeSampler`; penalties hear of paths that stand in no rows."""
        if not (isinstance(plan, DevicePlan) and looks_back(self.sampler, slots).any()):
            return super()._chains(plan, slots, first, paths, device)
        rows = np.array([last_row(path) for path in paths])
        looks = needs_chain(self.sampler, slots)
        chains = Chains.on_device(plan.buffers, slots, rows, first, looks)
        self._penalties.paths = chains.paths
        return chains

    def _draws(
        self,
        plan: StepPlan | DevicePlan | None,
        requests: Sequence[int],
        paths: list[list[int]],
    ) -> tuple[np.ndarray, DrawsOfRows]:
        """As `TreeSampler`; of trees that only the device knows, theirs."""
        if not isinstance(plan, DevicePlan):
            return super()._draws(plan, requests, paths)
        there = np.flatnonzero(plan.is_tree[requests])
        slots = plan.slots[requests][there].astype(np.int64)
        nodes = np.array([last_row(path) for path in paths])[there]

        def draws_of(kept: np.ndarray) -> TestedDraws:
            device = plan.buffers.tokens.device
            return plan.buffers.draws.of(*stage(device, slots[kept], nodes[kept]))

        return there, draws_of


def _most_rows(logits: torch.Tensor) -> int:
    """How many rows as wide as these [L, V] are sampled at once, as float32."""
    return MAX_CHUNK_BYTES // (logits.shape[1] * FLOAT32_BYTES)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other; one alone as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _nans_on_path(
    parts: Sequence[torch.Tensor | None],
    first: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor | None:
    """[R] NaNs in the logits of emitted tokens, where all rows' are counted.

    Args:
        parts: Those of all rows, in parts.
        first: [R] first row of each request.
        path: [R, N] rows that it has accepted.
        count: [R] how many they are.
    """
    if parts[0] is None:
        return None
    found, depths = _joined(parts), torch.arange(path.shape[1], device=path.device)
    on_path = found[first[:, None] + path] * (depths < count[:, None])
    return found[first] + on_path.sum(dim=1, dtype=found.dtype)


def _chosen(
    found: LogprobsTensors | None, first: torch.Tensor, path: torch.Tensor
) -> LogprobsTensors | None:
    """Log probabilities of emitted tokens; behind them stands what nobody reads.

    vLLM takes as many of each request as it has tokens (vllm/v1/outputs.py,
    `slice_request`).

    Args:
        found: Of all rows.
        first: [R] first row of each request.
        path: [R, N] rows that it has accepted, and zeros.
    """
    if found is None:
        return None
    rows = first[:, None] + torch.nn.functional.pad(path, (1, 0))
    num_reqs, width = rows.shape
    return taken(found, rows.flatten(), [i * width for i in range(num_reqs + 1)])
