"""What a step's commit is told, whatever the device."""

from collections.abc import Sequence
from typing import Protocol

import torch


class CommitPaths(Protocol):
    """Moves the K/V of accepted rows to the slots right after their root.

    It serves the layers of one KV cache group; the attention backend, which arranges
    their caches, brings it along (`commit_paths_of`).
    """

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        roots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Commit some requests of a step.

        Args:
            slot_mapping: [T] int64, the step's slots in that group.
            roots: Flat row of each request's root.
            paths: Of each request the accepted rows, counted from its root, from depth
                1 down, rising.
        """
