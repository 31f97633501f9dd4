"""The trie union of what several sources have found, a program for each request.

Definition: `merge` of `vllm_specinfer/tree/candidates.py`.

Dimension legend: R requests, C candidates per request of all sources, D levels that
more than one source has, Q sources, N nodes of a tree.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl

from vllm_specinfer.tree.on_device import DeviceCandidates, DeviceTree
from vllm_specinfer.tree.token_tree import ROOT

# Candidates that are compared at once.
BLOCK = 32


@triton.jit
def _above(parents_ptr, firsts_ptr, column, inside, depth):
    """The first column with the path of each candidate's parent."""
    parent = tl.load(parents_ptr + column, mask=inside, other=-1)
    known = inside & (parent >= 0) & (depth > 0)
    return tl.load(firsts_ptr + parent, mask=known, other=-1)


@triton.jit(do_not_specialize=["width", "num_levels", "deeper", "deeper_end"])
def _union_kernel(
    scores_out_ptr,
    parents_out_ptr,
    firsts_ptr,
    tokens_ptr,
    parents_ptr,
    scores_ptr,
    bounds_ptr,
    width,
    num_levels,
    deeper,
    deeper_end,
    NUM_SOURCES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    scores_out_ptr += row
    parents_out_ptr += row
    firsts_ptr += row
    tokens_ptr += row
    parents_ptr += row
    scores_ptr += row
    for depth in range(num_levels):
        for q in tl.static_range(NUM_SOURCES):
            of_q = bounds_ptr + (depth * NUM_SOURCES + q) * 2
            end = tl.load(of_q + 1)
            for begin in range(tl.load(of_q), end, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                inside = i < end
                above = _above(parents_ptr, firsts_ptr, i, inside, depth)
                token = tl.load(tokens_ptr + i, mask=inside, other=0)
                score = tl.load(scores_ptr + i, mask=inside, other=float("-inf"))
                live = score > float("-inf")
                first = i
                misses = tl.full([BLOCK], 1.0, tl.float64)
                for p in tl.static_range(NUM_SOURCES):
                    of_p = bounds_ptr + (depth * NUM_SOURCES + p) * 2
                    last = tl.load(of_p + 1)
                    # Of one source there is one candidate with a path.
                    chance = tl.zeros([BLOCK], tl.float64)
                    for other in range(tl.load(of_p), last, BLOCK):
                        j = other + tl.arange(0, BLOCK)
                        there = j < last
                        same = _above(parents_ptr, firsts_ptr, j, there, depth)
                        same = same[None, :] == above[:, None]
                        of_j = tl.load(tokens_ptr + j, mask=there, other=0)
                        same = same & (of_j[None, :] == token[:, None])
                        of_j = tl.load(scores_ptr + j, mask=there, other=float("-inf"))
                        same = same & (of_j > float("-inf"))[None, :] & live[:, None]
                        found = tl.where(same, j[None, :], width)
                        first = tl.minimum(first, tl.min(found, 1))
                        hit = tl.exp(of_j.to(tl.float64))
                        chance += tl.sum(tl.where(same, hit[None, :], 0.0), 1)
                    misses *= 1.0 - chance
                union = tl.log(1.0 - misses).to(tl.float32)
                kept = live & (first == i)
                union = tl.where(kept, union, float("-inf"))
                tl.store(scores_out_ptr + i, union, mask=inside)
                tl.store(parents_out_ptr + i, above, mask=inside)
                tl.store(firsts_ptr + i, first.to(tl.int64), mask=inside)
        # The next level reads what other threads have written.
        tl.debug_barrier()
    # What only one source goes on with.
    for begin in range(deeper, deeper_end, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < deeper_end
        parent = tl.load(parents_ptr + i, mask=inside, other=-1)
        shared = inside & (parent >= 0) & (parent < deeper)
        above = tl.load(firsts_ptr + parent, mask=shared, other=0)
        tl.store(parents_out_ptr + i, tl.where(shared, above, parent), mask=inside)
        tl.store(firsts_ptr + i, i.to(tl.int64), mask=inside)
        score = tl.load(scores_ptr + i, mask=inside, other=float("-inf"))
        tl.store(scores_out_ptr + i, score, mask=inside)


class Union:
    """Merges candidates of sources whose levels have always the same columns."""

    def __init__(self, ends: Sequence[Sequence[int]], device: torch.device) -> None:
        """Note where the levels lie; no capture may be under way.

        Args:
            ends: Of each source, its columns once the candidates of a depth are known.
            device: Where they are found.
        """
        self._firsts = [0]
        for of_source in ends:
            self._firsts.append(self._firsts[-1] + of_source[-1])
        depths = [len(of_source) for of_source in ends]
        # Deeper there are candidates of one source only.
        self._num_levels = sorted(depths)[-2] if len(ends) > 1 else 0
        bounds = torch.zeros(self._num_levels, len(ends), 2, dtype=torch.int32)
        for q, (first, of_source) in enumerate(zip(self._firsts, ends, strict=False)):
            levels = list(pairwise((0, *of_source)))[: self._num_levels]
            for depth, level in enumerate(levels):
                bounds[depth, q] = first + torch.tensor(level)
        self._bounds = bounds.to(device)
        deepest = depths.index(max(depths))
        self._deeper = self._firsts[deepest] + ends[deepest][self._num_levels - 1]
        self._deeper_end = self._firsts[deepest + 1]

    def of(
        self, sources: Sequence[DeviceCandidates]
    ) -> tuple[DeviceCandidates, torch.Tensor, torch.Tensor]:
        """The trie union of these sources' candidates.

        Returns:
            The union; [R, C] which of its columns each candidate became, sources one
            after the other; and [R, C] their scores.
        """
        if len(sources) == 1:
            (only,) = sources
            columns = torch.arange(only.tokens.shape[1], device=only.tokens.device)
            return only, columns.expand(len(only.tokens), -1), only.scores
        tokens = torch.cat([source.tokens for source in sources], dim=1)
        scores = torch.cat([source.scores for source in sources], dim=1)
        parents = torch.cat(
            [
                torch.where(source.parents == ROOT, ROOT, source.parents + first)
                for source, first in zip(sources, self._firsts, strict=False)
            ],
            dim=1,
        )
        union, above = torch.empty_like(scores), torch.empty_like(parents)
        columns = torch.empty_like(parents)
        _union_kernel[(len(tokens),)](
            *(union, above, columns, tokens, parents, scores, self._bounds),
            tokens.shape[1],
            *(self._num_levels, self._deeper, self._deeper_end),
            NUM_SOURCES=len(sources),
            BLOCK=BLOCK,
        )
        return DeviceCandidates(tokens, above, union), columns, scores

    def given(
        self, tree: DeviceTree, columns: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:
        """[R, Q, N] scores that each source gave each node, -inf where it gave none.

        Args:
            tree: Of the union.
            columns: What `of` returns beside it, and the next.
            scores: Of all candidates.
        """
        num_reqs, num_nodes = tree.scores.shape
        num_sources = len(self._firsts) - 1
        if num_sources == 1:
            return tree.scores[:, None]
        shape = num_reqs, num_sources, num_nodes + 1
        given = scores.new_full(shape, -torch.inf)
        for q, (first, end) in enumerate(pairwise(self._firsts)):
            places = tree.places.gather(1, columns[:, first:end])
            given[:, q].scatter_(1, places, scores[:, first:end])
        # Behind the nodes is what became none.
        return given[:, :, :num_nodes]
