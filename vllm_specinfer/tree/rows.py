"""Which K/V the rows of trees see, as attention is told.

Dimension legend: R requests, T flat query rows of the step, W 64-bit words per row.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_specinfer.tree.token_tree import WORD_BITS


@dataclass(frozen=True)
class TreeRows:
    """Which KV positions each query row sees, for requests whose rows form a tree.

    Row t of request r sees the positions below `context_lens[r]`, and position
    `context_lens[r] + j` where bit j % 64 of word j // 64 of its bits is set. The rows
    need not be the last positions of the request.

    Attributes:
        is_tree: [R] bool; the rows of other requests are ordinary causal ones.
        context_lens: [R] int32.
        ancestor_bits: [T, W] int64.
        all_tree: `is_tree` holds everywhere, so nothing else needs to run.
    """

    is_tree: torch.Tensor
    context_lens: torch.Tensor
    ancestor_bits: torch.Tensor
    all_tree: bool = False

    def visible(self, rows: slice, count: int) -> torch.Tensor:
        """[n, count] bool: which positions after the context these rows see."""
        position = torch.arange(count, device=self.ancestor_bits.device)
        words = self.ancestor_bits[rows, position // WORD_BITS]
        return (words >> (position % WORD_BITS)) & 1 == 1

    def write_to(self, trees: "TreeRows") -> None:
        """Copy them to where there is room for more requests and rows.

        Raises:
            ValueError: The bit rows have another number of words.
        """
        (num_rows, words), room = self.ancestor_bits.shape, trees.ancestor_bits
        if words != room.shape[1]:
            raise ValueError(
                f"ancestor bits must have {room.shape[1]} words per row; got {words}"
            )
        num_reqs = len(self.is_tree)
        trees.is_tree[:num_reqs].copy_(self.is_tree, non_blocking=True)
        trees.context_lens[:num_reqs].copy_(self.context_lens, non_blocking=True)
        room[:num_rows].copy_(self.ancestor_bits, non_blocking=True)


class WritesTreeRows(Protocol):
    """The rows of a step's trees, wherever they are known."""

    def write_to(self, trees: TreeRows) -> None:
        """As `TreeRows.write_to`."""
