"""Trees that are put together where the host does not look on.

All shapes are fixed, so that captured graphs can do it. The definition of `cut` is
`Candidates.cut`; the kernels of `kernels/triton/union.py` and `trees.py` do the rest.

Dimension legend: S request slots, R requests, C candidates per request, D levels, N
nodes of a tree, W 64-bit words per bit row.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_specinfer.tree.token_tree import NO_NODE, num_words

if TYPE_CHECKING:
    from vllm_specinfer.tree.device_draws import DrawBuffers


class DeviceCandidates(NamedTuple):
    """`Candidates` on the device, level by level.

    Attributes:
        tokens: [R, C] int64.
        parents: [R, C] int64.
        scores: [R, C] float32.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor


class DeviceTree(NamedTuple):
    """R finished trees.

    Attributes:
        parents: [R, N] int32; `NO_NODE` where there is none.
        scores: [R, N] float32.
        places: [R, C] int64 the node of each candidate, N where it is none.
    """

    parents: torch.Tensor
    scores: torch.Tensor
    places: torch.Tensor


def cut(candidates: DeviceCandidates, num_nodes: int) -> DeviceCandidates:
    """Only the N best of each request; the columns stay what they are."""
    scores = candidates.scores
    if scores.shape[1] <= num_nodes:
        return candidates
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return candidates._replace(
        scores=scores.scatter(1, order[:, num_nodes:], -torch.inf)
    )


class TreeBuffers:
    """The tree that the device has drafted for each request slot.

    Attributes:
        max_depth: No node is deeper (D).
        tokens: [S + 1, N] int64; the last row is for padding.
        parents: [S + 1, N] int32.
        depths: [S + 1, N + 1] int32.
        bits: [S + 1, N + 1, W] int64.
        draws: Those below the rows; None where nobody tests them.
    """

    draws: "DrawBuffers | None" = None

    def __init__(
        self, max_num_reqs: int, num_nodes: int, max_depth: int, device: torch.device
    ) -> None:
        """Trees without nodes."""
        self.max_depth = max_depth
        num_rows = max_num_reqs + 1

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, *shape, dtype=dtype, device=device)

        self.tokens = zeros(num_nodes, dtype=torch.int64)
        self.parents = zeros(num_nodes, dtype=torch.int32) + NO_NODE
        self.depths = zeros(num_nodes + 1, dtype=torch.int32)
        words = num_words(num_nodes + 1)
        self.bits = zeros(num_nodes + 1, words, dtype=torch.int64)

    @property
    def padding(self) -> int:
        """The row that nobody reads."""
        return len(self.tokens) - 1

    def chains(
        self, slots: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows from the root down to given ones.

        Args:
            slots: [G] int64 request slots.
            rows: [G] int64 rows of their trees, 0 for the root.

        Returns:
            [G, D + 1] int64 rows, each chain at the end and the root before it, too;
            [G, D + 1] int32 how many rows before each belong to its path.
        """
        chain = [rows]
        for _ in range(self.max_depth):
            node = (chain[-1] - 1).clamp_min(0)
            above = (self.parents[slots, node].long() + 1).clamp_min(0)
            chain.append(torch.where(chain[-1] > 0, above, 0))
        places = torch.arange(-self.max_depth, 1, device=rows.device)
        before = (self.depths[slots, rows][:, None] + places).clamp_min(0)
        return torch.stack(chain[::-1], dim=1), before.int()
