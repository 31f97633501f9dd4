"""Growing the trees of a batch where the host does not look on.

The definition is `TreeGrowth`. Here all shapes are fixed, so that captured graphs can
grow trees: every request has as many rows at a level as a level can have, and a mask
says which are nodes. A row costs the same whether it is one, so a best-first tree
expands all that may be among its N best. What `extend` and `advance` define, the
kernels of `kernels/triton/growth.py` do at once. Not yet run on a GPU.

Dimension legend: R requests, D levels, F nodes of a level per request, K children of
each, C candidates per request, N nodes per request, W 64-bit words per bit row.
"""

import itertools
from typing import NamedTuple

import torch

from vllm_specinfer.drafting.growth import level_sizes, level_words
from vllm_specinfer.options import BestFirstTree, Tree
from vllm_specinfer.tree.token_tree import ROOT, WORD_BITS


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
    """Candidates of R trees; `extend` and `advance` in turn, level by level.

    Everything is written to tensors that stay where they are. That of a level is valid
    until the level is written again.

    Attributes:
        tokens: [R, C] int64.
        parents: [R, C] int32.
        scores: [R, C] float32; -inf where a column is none.
        levels: [D] the roots and what is expanded, from depth 0 down.
        sizes: [D] nodes of each level (F).
        num_children: [D] children of each of them (K).
        starts: [D] columns before the children of a level.
        ends: [D] columns once the children of a level are known.
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

        # Of all levels, so that one launch clears them.
        self._is_node = zeros(sum(sizes), dtype=torch.bool).flatten()
        is_node = self._is_node.split([num_reqs * size for size in sizes])
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
        self._word_firsts = torch.arange(words, device=device) * WORD_BITS

    def start(self, grows: torch.Tensor) -> None:
        """Begin anew with the requests [R] that grow; the others get no nodes."""
        self._is_node.zero_()
        self.levels[0].is_node.copy_(grows[:, None])
        self.scores.fill_(-torch.inf)

    def extend(self, depth: int, logprobs: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the children of the nodes at a depth.

        Args:
            depth: Theirs.
            logprobs: [R * F, K] float32 log-probability of each child given its
                parent's path; -inf where there is none. Rows of no node do not count.
            tokens: [R * F, K] int64, distinct within a row where there is a child.
        """
        level, k = self.levels[depth], self.num_children[depth]
        num_reqs, size = level.columns.shape
        scores = logprobs.view(num_reqs, size, k) + level.scores[:, :, None]
        scores = torch.where(level.is_node[:, :, None], scores, -torch.inf)
        new = slice(self.starts[depth], self.ends[depth])
        self.scores[:, new] = scores.flatten(1)
        self.tokens[:, new] = tokens.view(num_reqs, -1)
        self.parents[:, new] = level.columns[:, :, None].expand(-1, -1, k).flatten(1)

    def advance(
        self, depth: int, capacity: torch.Tensor, max_depth: torch.Tensor
    ) -> Level:
        """Choose the nodes of a depth that are expanded.

        Args:
            depth: Theirs, from 1 on; their level's columns are known.
            capacity: [R] int64 scratch slots available per request.
            max_depth: [R] int64 deepest node whose K/V may be written.
        """
        above, level = self.levels[depth - 1], self.levels[depth]
        first, end = self.starts[depth - 1], self.ends[depth - 1]
        new = self.scores[:, first:end]
        live = new.isfinite()
        size = level.columns.shape[1]
        if self.best_first:
            if end >= self.num_nodes:
                found = self.scores[:, :end].topk(self.num_nodes).values
                live &= new >= found[:, -1:]
            order = new.sort(dim=1, descending=True, stable=True).indices[:, :size]
        else:
            order = torch.arange(size, device=new.device).expand(len(new), -1)
        is_node = live.gather(1, order) & (max_depth >= depth)[:, None]
        scratch = above.used[:, None] + is_node.cumsum(1) - 1
        is_node &= scratch < capacity[:, None]
        parents = order // self.num_children[depth - 1]
        words = self._word_firsts.expand(*parents.shape, -1)
        own = scratch[:, :, None] - words
        inside = (own >= 0) & (own < WORD_BITS)
        own = torch.where(inside, 1 << own.clamp(0, WORD_BITS - 1), 0)
        bits = above.bits.gather(1, parents[:, :, None].expand_as(words)) | own
        values = Level(
            columns=first + order,
            is_node=is_node,
            parents=parents,
            scores=new.gather(1, order),
            scratch=scratch,
            bits=torch.where(is_node[:, :, None], bits, 0),
            used=above.used + is_node.sum(1),
        )
        for kept, value in zip(level, values, strict=True):
            kept.copy_(value)
        return level
