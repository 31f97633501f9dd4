"""Penalties of trees that only the device knows."""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from vllm_specinfer.kernels.triton.penalties import path_penalties


class PathPenalties:
    """Stands among a sampler's processors where vLLM's penalties do.

    Attributes:
        paths: [L, D] int32 tokens drafted before the rows that are sampled next; None
            where they stand in the rows before.
    """

    def __init__(self, penalties: PenaltiesState) -> None:
        """Wrap vLLM's, which goes on knowing the requests."""
        self._penalties = penalties
        self.paths: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._penalties, name)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """As vLLM's, but for the paths."""
        state = self._penalties
        if self.paths is None:
            return state.apply(logits, ctx)
        path_penalties(
            logits,
            ctx.expanded_idx_mapping,
            self.paths,
            state.repetition_penalty.gpu,
            state.frequency_penalty.gpu,
            state.presence_penalty.gpu,
            state.prompt_bin_mask,
            state.output_bin_counts,
        )
        return logits
