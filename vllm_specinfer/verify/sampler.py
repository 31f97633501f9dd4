"""The rejection sampler of tree steps: verify, emit, commit.

Dimension legend: R requests, L logits rows of a step, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.tree.table import StepPlan
from vllm_specinfer.verify.greedy import walk

# Accepted rows of a step: batch index -> path, row i + 1 = node i.
Accepted = dict[int, list[int]]


class TreeSampler:
    """Stands where vLLM has its RejectionSampler (same call, same outputs).

    Called only when some request of the batch has drafts. Requests without a live
    tree get the token of their first row from vLLM's own sampler, and all their
    drafts are rejected.
    """

    # vLLM's warm-up reads it from whatever verifies drafts (gpu/warmup.py).
    enable_adaptive_verification = False

    def __init__(
        self,
        sampler: Sampler,
        plan_of: Callable[[InputBatch], StepPlan | None],
        commit: Callable[[InputBatch, Accepted], None],
    ) -> None:
        """Wrap vLLM's sampler.

        Args:
            sampler: vLLM's sampler, for rows without a tree.
            plan_of: The tree layout of a batch, None where it has no live tree.
            commit: Moves the accepted rows' K/V to consecutive slots.
        """
        self.sampler = sampler
        self._plan_of = plan_of
        self._commit = commit

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
            invalid_drafts: Unused: requests with a grammar get no tree.

        Returns:
            Accepted path and bonus token per request, in order.
        """
        plan = self._plan_of(input_batch)
        if plan is None or not plan.all_tree or self.sampler.compute_nans:
            output = self._sample_roots(logits, input_batch)
        else:
            output = SamplerOutput(
                sampled_token_ids=torch.zeros(input_batch.num_reqs, 1).long(),
                logprobs_tensors=None,
                num_nans=None,
                num_sampled=torch.ones(input_batch.num_reqs, dtype=torch.int32),
                num_rejected=torch.zeros(input_batch.num_reqs, dtype=torch.int32),
            )
        if plan is not None:
            self._verify(logits, input_batch, plan, output)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            output.num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        output.num_sampled, output.num_rejected = num_sampled, num_rejected
        return output

    def _sample_roots(
        self, logits: torch.Tensor, input_batch: InputBatch
    ) -> SamplerOutput:
        """Plain sampling of each request's first row."""
        num_reqs = input_batch.num_reqs
        roots = input_batch.cu_num_logits[:-1].long()
        rows = torch.arange(
            num_reqs + 1, dtype=torch.int32, device=input_batch.cu_num_logits.device
        )
        view = replace(
            input_batch,
            expanded_idx_mapping=input_batch.idx_mapping,
            expanded_local_pos=torch.zeros_like(rows[:-1]),
            num_draft_tokens=0,
            num_draft_tokens_per_req=None,
            logits_indices=input_batch.logits_indices[roots],
            cu_num_logits=rows,
            cu_num_logits_np=np.arange(num_reqs + 1, dtype=np.int32),
        )
        return self.sampler(logits[roots], view)

    def _verify(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        plan: StepPlan,
        output: SamplerOutput,
    ) -> None:
        """Walk the trees; overwrite the tree requests' outputs."""
        # Ties go to the lowest token id, as in vLLM's greedy sampler. NumPy's argmax
        # over a vocabulary is several times quicker than torch's.
        choices = logits.float().numpy().argmax(axis=-1)
        input_ids = input_batch.input_ids.numpy()
        accepted: Accepted = {}
        emitted: dict[int, list[int]] = {}
        for i in plan.tree_requests():
            rows = plan.num_rows[i]
            start = plan.query_start_loc[i]
            first = input_batch.cu_num_logits_np[i]
            accepted[i], emitted[i] = walk(
                input_ids[start + 1 : start + rows],
                plan.table.parents[plan.slots[i], : rows - 1],
                choices[first : first + rows],
            )
        width = max(map(len, emitted.values()))
        sampled = torch.zeros(input_batch.num_reqs, width, dtype=torch.int64)
        sampled[:, :1] = output.sampled_token_ids
        sampled_np, num_sampled = sampled.numpy(), output.num_sampled.numpy()
        for i, tokens in emitted.items():
            sampled_np[i, : len(tokens)] = tokens
            num_sampled[i] = len(tokens)
        output.sampled_token_ids = sampled
        self._commit(input_batch, accepted)
