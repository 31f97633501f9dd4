"""vLLM's sampler in two halves: logits processors, and what comes after them.

Only processors look back at the rows before a row (`verify/chains.py`). Top-p, which
sorts the whole vocabulary of a row, and the draw are for the last rows alone.

Dimension legend: L rows of chains, G rows to sample, V vocabulary.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import as_array


class _NoBudgets:
    """Stands for thinking budgets, which have been applied."""

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> None:
        """Nothing."""


class ProcessedSampler(Sampler):
    """vLLM's sampler without its logits processors: it is told what they have left.

    It shares the states of the sampler it is made from, so that raw log probabilities,
    temperature, top-k, top-p, min-p and draws are vLLM's own.

    Attributes:
        processed: [G, V] the next call's logits behind the processors; no longer held
            than that needs them.
    """

    processed: torch.Tensor | None = None

    def __init__(self, sampler: Sampler) -> None:
        """Share `sampler`."""
        self.__dict__.update(sampler.__dict__)
        self.logits_processors = []
        self.thinking_budget_state = _NoBudgets()

    def sample(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, of `processed`."""
        processed, self.processed = self.processed, None
        return super().sample(processed, *args, **kwargs)


def process(sampler: Sampler, logits: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """What a sampler's processors leave of logits, which stay what they are.

    As the first half of vLLM's `Sampler.apply_sampling_params`.

    Args:
        sampler: vLLM's.
        logits: [L, V].
        batch: Whose rows they are.

    Returns:
        [L, V] float32, or the logits themselves where no request asks for more.
    """
    requests = batch.idx_mapping_np
    if not sampler.needs_logits_processing[requests].any():
        return logits
    logits = logits.to(torch.float32, copy=True)
    context = LogitsContext(
        expanded_idx_mapping=batch.expanded_idx_mapping,
        idx_mapping=batch.idx_mapping,
        idx_mapping_np=requests,
        expanded_local_pos=batch.expanded_local_pos,
        input_ids=batch.input_ids[batch.logits_indices],
        pos=batch.positions[batch.logits_indices],
        seq_lens_upper_bound_np=as_array(batch.seq_lens_cpu_upper_bound),
    )
    for processor in sampler.logits_processors:
        logits = processor.apply(logits, context)
    sampler.thinking_budget_state.apply(logits, context)
    return logits
