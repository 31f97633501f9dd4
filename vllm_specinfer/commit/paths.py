"""What a step's commit is told.

It moves the K/V of accepted rows to the slots right after their root, in the layers of
one KV cache group; the attention backend, which arranges their caches, brings it along
(`commit_paths_of`). `slot_mapping` [T] int64 are the step's slots in that group.
"""

from collections.abc import Sequence
from typing import Protocol

import torch


class CommitPaths(Protocol):
    """Where the host walks down the trees."""

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        roots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Commit some requests of a step.

        Args:
            slot_mapping: See above.
            roots: Flat row of each request's root.
            paths: Of each request the accepted rows, counted from its root, from depth
                1 down, rising.
        """


class CommitWalks(Protocol):
    """Where the device walks; the host waits for nothing."""

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        first: torch.Tensor,
        path: torch.Tensor,
        count: torch.Tensor,
    ) -> None:
        """Commit all requests of a step.

        Args:
            slot_mapping: See above.
            first: [R] flat row of each request's root.
            path: [R, N] int32 accepted rows within the request, from depth 1 down,
                rising.
            count: [R] int32 how many they are.
        """
