"""Rows to sample, each behind the rows that logits processors look back at.

Penalties, bad words, thinking budgets and custom processors find the tokens drafted
before a row in the rows before it (vllm/v1/worker/gpu/sample/penalties.py). Siblings
have no such place, so that each row that needs one gets its own copy of its path; on
the device not for penalties (`verify/path_penalties.py`).

Dimension legend: G rows to sample, n rows of their chains, D levels of a tree.
"""

from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import stage
from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.on_device import TreeBuffers


class Chains(NamedTuple):
    """The chains of G rows.

    Attributes:
        counts: [G] rows of each; its last one is sampled.
        rows: [n] int64 logits rows, on the device.
        before: [n] int32 rows of its path before each, on the device.
        paths: [n, D] int32 tokens drafted before each sampled one, on the device; None
            where no tree is only the device's.
    """

    counts: np.ndarray
    rows: torch.Tensor
    before: torch.Tensor
    paths: torch.Tensor | None = None

    @classmethod
    def along(
        cls,
        paths: list[list[int]],
        first: np.ndarray,
        looks: np.ndarray,
        device: torch.device,
    ) -> "Chains":
        """Along paths that the host knows.

        Args:
            paths: [G] rows of the tree, from depth 1 down to each row.
            first: [G] logits row of each tree's root.
            looks: [G] bool, whether processors look back.
            device: Where the logits are.
        """
        chains = [
            [0, *path] if looks_back else [last_row(path)]
            for path, looks_back in zip(paths, looks, strict=True)
        ]
        counts = np.array([len(chain) for chain in chains])
        rows = np.concatenate(chains) + np.repeat(first, counts)
        before = np.concatenate([np.arange(n, dtype=np.int32) for n in counts])
        return cls(counts, *stage(device, rows, before))

    @classmethod
    def on_device(
        cls,
        buffers: TreeBuffers,
        slots: np.ndarray,
        rows: np.ndarray,
        first: np.ndarray,
        looks: np.ndarray,
    ) -> "Chains":
        """Along paths that only the device knows: as long as they may be.

        Args:
            buffers: Where the trees are.
            slots: [G] request slots.
            rows: [G] rows of their trees.
            first: As `along`.
            looks: [G] bool, whether anything but penalties looks back.
        """
        depth = buffers.max_depth
        counts = np.where(looks, depth + 1, 1)
        chain = np.repeat(np.arange(len(rows)), counts)
        ends = np.cumsum(counts)[chain]
        places = depth + 1 + np.arange(len(chain)) - ends
        slots, rows, first, looks, chain, places = stage(
            buffers.tokens.device,
            *(slots.astype(np.int64), rows.astype(np.int64), first.astype(np.int64)),
            *(looks, chain, places),
        )
        found, before = buffers.chains(slots, rows)
        tokens = buffers.tokens[slots[:, None], (found - 1).clamp_min(0)]
        paths = torch.where(before > 0, tokens, NO_TOKEN)[:, 1:].int()
        return cls(
            counts,
            (first[:, None] + found)[chain, places],
            (looks[:, None] * before)[chain, places],
            paths[chain],
        )


def last_row(path: list[int]) -> int:
    """The row of the tree that a path from depth 1 down leads to; 0 for the root."""
    return path[-1] if path else 0


def looks_back(sampler: Sampler, slots: np.ndarray) -> np.ndarray:
    """[G] whose logits depend on the tokens drafted before a row."""
    return sampler.penalties_state.use_penalty[slots] | needs_chain(sampler, slots)


def needs_chain(sampler: Sampler, slots: np.ndarray) -> np.ndarray:
    """[G] the same but for penalties."""
    _, _, bad_words, *custom = sampler.logits_processors
    thinking = sampler.thinking_budget_state
    looks = bad_words.num_bad_words.np[slots] > 0
    if thinking.enabled:
        looks = looks | thinking.use_thinking_budget[slots]
    return looks | bool(custom)
