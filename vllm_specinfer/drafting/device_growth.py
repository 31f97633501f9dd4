"""Growing the trees of a batch where the host does not look on.

The definition is `TreeGrowth`. Here all shapes are fixed, so that captured graphs can
grow trees: every request has as many rows at a level as a level can have, and a mask
says which are nodes. A row costs the same whether it is one, so a best-first tree
expands all that may be among its N best. The kernels of `kernels/triton/growth.py`
grow its levels.

Dimension legend: R requests, D levels, F nodes of a level per request, K children of
each, C candidates per request, N nodes per request, S request slots, W 64-bit words
per bit row.
"""

import itertools
from typing import NamedTuple

import torch

from vllm_specinfer.drafting.growth import level_sizes, level_words
from vllm_specinfer.options import BestFirstTree, Tree
from vllm_specinfer.tree.token_tree import ROOT


class Level(NamedTuple):
    """The nodes of R trees whose children come next.

    Attributes:
        columns: [R, F] int64, the candidate each of them is; `ROOT` for the root.
        is_node: [R, F] bool; the others stand for nothing.
        parents: [R, F] int64, the row of its request in the level above.
        scores: [R, F] float32.
        scratch: [R, F] int64 where the nodes' K/V goes: slots after the last row.
        bits: [R, F, W] int64, the scratch slots each node sees.
        used: [R] int64 scratch slots in use, those of this level included.
    """

    columns: torch.Tensor
    is_node: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    scratch: torch.Tensor
    bits: torch.Tensor
    used: torch.Tensor


class DeviceGrowth:
    """Candidates of R trees, level by level.

    Everything is written to tensors that stay where they are. That of a level is valid
    until the level is written again.

    Attributes:
        tokens: [R, C] int64.
        parents: [R, C] int32.
        scores: [R, C] float32; -inf where a column is none.
        levels: [D] the roots and what is expanded, from depth 0 down.
        sizes: [D] nodes of each level (F).
        num_children: [D] children of each of them (K).
        starts: [D + 1] columns before the children of a level.
        ends: [D] columns once the children of a level are known.
        is_node: [R * sum(F)] bool of all levels, one after the other.
        num_nodes: N.
        best_first: Whether the likeliest are expanded, or all.
    """

    def __init__(
        self, tree: Tree, num_nodes: int, num_reqs: int, device: torch.device
    ) -> None:
        """Make room.

        Args:
            tree: The trees' shape.
            num_nodes: Nodes to keep per tree (N).
            num_reqs: R.
            device: Where they grow.
        """
        self.best_first = isinstance(tree, BestFirstTree)
        self.num_nodes = num_nodes
        sizes = self.sizes = (1, *level_sizes(tree, num_nodes))
        if self.best_first:
            children = (min(tree.max_width, num_nodes),) * len(sizes)
        else:
            children = tree.widths
        self.num_children = children
        new = [f * k for f, k in zip(sizes, children, strict=True)]
        self.ends = tuple(itertools.accumulate(new))
        self.starts = (0, *self.ends)
        shape = num_reqs, self.ends[-1]
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.parents = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scores = torch.zeros(shape, device=device)
        words = level_words(tree, num_nodes)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(num_reqs, *shape, dtype=dtype, device=device)

        self.is_node = zeros(sum(sizes), dtype=torch.bool).flatten()
        is_node = self.is_node.split([num_reqs * size for size in sizes])
        self.levels = [
            Level(
                columns=zeros(size),
                is_node=of_level.view(num_reqs, size),
                parents=zeros(size),
                scores=zeros(size, dtype=torch.float32),
                scratch=zeros(size),
                bits=zeros(size, words),
                used=zeros(),
            )
            for size, of_level in zip(sizes, is_node, strict=True)
        ]
        self.levels[0].columns.fill_(ROOT)

    def start(
        self,
        context: torch.Tensor,
        roots: torch.Tensor,
        slots: torch.Tensor,
        grows: torch.Tensor,
        lengths: torch.Tensor,
        lookahead: int,
    ) -> None:
        """Begin anew with the requests that grow; the others get no nodes.

        Args:
            context: [R] int64 positions before their nodes, written.
            roots: [R] int64 positions of the roots, written.
            slots: [R] int64 request slots.
            grows: [R] bool.
            lengths: [S] int32 tokens of all texts.
            lookahead: K/V of so many of a text's last tokens there is not.
        """
        of_slots = lengths[slots].long()
        # Padding has a slot, too, but nothing to attend to.
        context.copy_(torch.where(grows, of_slots - lookahead, 0))
        roots.copy_(of_slots - 1)
        self.is_node.zero_()
        self.levels[0].is_node.copy_(grows[:, None])
        self.scores.fill_(-torch.inf)
