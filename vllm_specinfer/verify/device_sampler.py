"""Verification that hardly waits for the device: all rows first, then the walk.

Dimension legend: R requests of the batch, L logits rows of a step, G rows of trees and
roots, N nodes per tree, V vocabulary.
"""

import time
from collections.abc import Callable
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
from vllm_specinfer.tree.proposals import stacked
from vllm_specinfer.tree.table import StepPlan
from vllm_specinfer.verify.sampler import Accepted, TreeSampler
from vllm_specinfer.verify.stochastic import TEST_SALT, DrawTestingSampler

# Logits of rows that are sampled at once, as vLLM bounds them
# (vllm/v1/worker/gpu/spec_decode/rejection_sampler.py).
MAX_CHUNK_BYTES, FLOAT32_BYTES = 1 << 30, 4


class DeviceTreeSampler(TreeSampler):
    """`TreeSampler` where the host is not the device.

    Every row of a tree gets its token, also those that the walk will not come to: rows
    are cheap there, waiting is not. One launch then walks down all trees, and their K/V
    is committed; what was accepted the host hears when it drafts or sends the tokens.
    """

    def __init__(
        self,
        sampler: Sampler,
        plan_of: Callable[[InputBatch], StepPlan | None],
        positions: torch.Tensor,
        commit: Callable[
            [InputBatch, torch.Tensor, torch.Tensor], Callable[[], Accepted]
        ],
        on_time: Callable[[str, float], None],
        verification: str = "coupled",
    ) -> None:
        """As `TreeSampler`.

        Args:
            sampler: As there.
            plan_of: As there.
            positions: As there.
            commit: Moves the K/V of accepted rows [R, N] int32, so many [R] int32 of
                each request; waits for them where its result is called.
            on_time: As there.
            verification: As there.
        """
        super().__init__(sampler, plan_of, positions, commit, on_time, verification)
        if self._tests is not None:
            self._tests = DeviceDrawTestingSampler(sampler)

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
        paths = [plan.paths(i) for i in range(num_reqs)]
        counts = np.array([len(of_request) for of_request in paths])
        requests = np.repeat(np.arange(num_reqs), counts).tolist()
        flat_paths = [path for of_request in paths for path in of_request]
        most = max(1, MAX_CHUNK_BYTES // (logits.shape[1] * FLOAT32_BYTES))
        if self.sampler.get_logprobs_dims(input_batch.idx_mapping_np) is not None:
            most = len(requests)  # every row has as many, whatever its request wants
        outputs = [
            self._of_rows(
                logits,
                input_batch,
                plan,
                requests[begin : begin + most],
                flat_paths[begin : begin + most],
            )
            for begin in range(0, len(requests), most)
        ]
        targets, logprobs, num_nans = map(_whole, zip(*outputs, strict=True))
        drafts, parents = plan.drafts_and_parents(logits.device)
        first, num_rows = stage(
            logits.device, np.cumsum(counts) - counts, counts.astype(np.int32)
        )
        path, num_accepted = walk_trees(targets, drafts, first, num_rows, parents)
        depths = torch.arange(path.shape[1], device=path.device)
        path = torch.where(depths < num_accepted[:, None], path, 0)
        rows = first[:, None] + torch.nn.functional.pad(path, (1, 0))
        self._on_time(VERIFY, time.perf_counter() - started)
        accepted = self._commit(input_batch, path, num_accepted)
        if logprobs is not None:
            logprobs = _chosen(logprobs, np.cumsum(counts) - counts, accepted())
        if num_nans is not None:
            num_nans = num_nans[first]
        return self._emitted(
            input_batch, targets[rows], num_accepted + 1, logprobs, num_nans
        )

    def _of_rows(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        plan: StepPlan,
        requests: list[int],
        paths: list[list[int]],
    ) -> tuple[torch.Tensor, LogprobsTensors | None, torch.Tensor | None]:
        """[G] tokens of rows, their log probabilities and numbers of NaNs."""
        if self._only_draws(batch.idx_mapping_np):
            drawn = self._drawn(logits, batch, plan, requests, paths)
            return drawn[:, 0], None, None
        output = self._sample(logits, batch, plan, requests, paths)
        tokens = output.sampled_token_ids[:, 0]
        return tokens, output.logprobs_tensors, output.num_nans

    def _argmax(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """[G, 1] likeliest tokens of rows, on the device."""
        (places,) = stage(logits.device, np.array(rows))
        if len(rows) * 2 < len(logits):
            return logits[places].argmax(dim=-1)[:, None]
        # Nearly all are asked for, and a gather would copy them.
        return logits.argmax(dim=-1)[places, None]


class DeviceDrawTestingSampler(DrawTestingSampler):
    """Tests by a kernel."""

    def _tested(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        places: torch.Tensor,
        pos: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draws = stacked([self._draws[row] for row in rows.tolist()])
        seeds = self.sampling_states.seeds.np[self._slots[rows]]
        tokens, q, drawn, seeds = stage(
            logits.device, draws.tokens, draws.q, draws.places, seeds
        )
        logits = logits.to(torch.float32, copy=True)
        positions = pos[places] + TEST_SALT
        found = verify_draws(logits, places, tokens, q, drawn, seeds, positions)
        return logits, found


def _whole(parts: tuple[Any, ...]) -> Any:
    """What was found of all rows; log probabilities are found at once."""
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts)


def _chosen(
    found: LogprobsTensors, first: np.ndarray, accepted: Accepted
) -> LogprobsTensors:
    """The log probabilities of emitted tokens.

    Args:
        found: Of all rows [G].
        first: [R] first row of each request.
        accepted: Its accepted rows.
    """
    rows = [
        [start, *(start + row for row in accepted.get(i, []))]
        for i, start in enumerate(first.tolist())
    ]
    ends = np.cumsum([0, *map(len, rows)]).tolist()
    (chosen,) = stage(found.logprobs.device, np.concatenate(rows))
    return LogprobsTensors(
        found.logprob_token_ids[chosen],
        found.logprobs[chosen],
        found.selected_token_ranks[chosen],
        ends,
    )
