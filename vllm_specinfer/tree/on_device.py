"""Trees that are put together where the host does not look on.

The definitions are `merge`, `Candidates.cut` and `best`, `node_depths` and
`ancestor_bits`; here all shapes are fixed, so that captured graphs can do it. What
`merged`, `best` and `TreeBuffers.write` define, the kernels of
`kernels/triton/union.py` and `trees.py` do at once. Not yet run on a GPU.

Dimension legend: S request slots, R requests, C candidates per request, D levels, N
nodes of a tree, W 64-bit words per bit row.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_specinfer.tree.token_tree import NO_NODE, ROOT, WORD_BITS, num_words

if TYPE_CHECKING:
    from vllm_specinfer.tree.device_draws import DrawBuffers


class DeviceCandidates(NamedTuple):
    """`Candidates` on the device, level by level.

    Attributes:
        tokens: [R, C] int64.
        parents: [R, C] int64.
        scores: [R, C] float32.
        ends: [D] columns once the candidates of a depth are known, 1 first.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    ends: Sequence[int]


class DeviceTree(NamedTuple):
    """R finished trees.

    Attributes:
        tokens: [R, N] int64; where there is no node, a token that exists.
        parents: [R, N] int32; `NO_NODE` where there is none.
        scores: [R, N] float32.
        places: [R, C] int64 the node of each candidate, N where it is none.
    """

    tokens: torch.Tensor
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


def merged(
    sources: Sequence[DeviceCandidates],
) -> tuple[DeviceCandidates, torch.Tensor]:
    """The trie union of several sources' candidates.

    Args:
        sources: At least one.

    Returns:
        The union, whose `ends` say nothing; and [R, C] which of its columns each
        candidate became, sources one after the other.
    """
    if len(sources) == 1:
        (only,) = sources
        columns = torch.arange(only.tokens.shape[1], device=only.tokens.device)
        return only, columns.expand(len(only.tokens), -1)
    firsts = [0]
    for source in sources:
        firsts.append(firsts[-1] + source.tokens.shape[1])
    tokens = torch.cat([source.tokens for source in sources], dim=1)
    parents = torch.cat(
        [
            torch.where(source.parents == ROOT, ROOT, source.parents + first)
            for source, first in zip(sources, firsts, strict=False)
        ],
        dim=1,
    )
    scores = torch.cat([source.scores for source in sources], dim=1)
    union = torch.full_like(scores, -torch.inf)
    # Of each candidate the first with its path.
    firsts_of_path = torch.arange(firsts[-1], device=tokens.device)
    firsts_of_path = firsts_of_path.repeat(len(tokens), 1)
    # Deeper there are candidates of one source only.
    levels = [len(source.ends) for source in sources]
    shared, deepest = sorted(levels)[-2], levels.index(max(levels))
    for depth in range(shared):
        columns = torch.cat([
            torch.arange(first + start, first + end, device=tokens.device)
            for source, first in zip(sources, firsts, strict=False)
            for start, end in list(pairwise((0, *source.ends)))[depth : depth + 1]
        ])  # fmt: skip
        above = parents[:, columns]
        if depth:
            above = firsts_of_path.gather(1, above.clamp_min(0))
        parents[:, columns] = above
        token, score = tokens[:, columns], scores[:, columns]
        live = score.isfinite()
        same = (above[:, :, None] == above[:, None]) & (
            token[:, :, None] == token[:, None]
        )
        same &= live[:, :, None] & live[:, None]
        first = same.to(torch.int8).argmax(dim=2)
        itself = torch.arange(len(columns), device=tokens.device)
        first = torch.where(live, first, itself)
        firsts_of_path[:, columns] = columns[first]
        misses = torch.where(same, 1 - score.double().exp()[:, None], 1.0).prod(dim=2)
        chances = torch.log1p(-misses).float()
        kept = live & (first == itself)
        union[:, columns] = torch.where(kept, chances, -torch.inf)
    first = firsts[deepest] + sources[deepest].ends[shared - 1]
    deeper = slice(first, firsts[deepest + 1])
    above = parents[:, deeper]
    parents[:, deeper] = torch.where(
        above == ROOT, ROOT, firsts_of_path.gather(1, above.clamp_min(0))
    )
    union[:, deeper] = scores[:, deeper]
    return DeviceCandidates(tokens, parents, union, ()), firsts_of_path


def best(candidates: DeviceCandidates, num_nodes: int, least: float) -> DeviceTree:
    """The trees of the N best candidates with a score of at least `least`."""
    num_reqs, width = candidates.tokens.shape
    order = candidates.scores.sort(dim=1, descending=True, stable=True).indices
    order = order[:, :num_nodes]
    nodes = torch.arange(order.shape[1], device=order.device)
    scores = candidates.scores.gather(1, order)
    kept = scores.isfinite() & (scores >= least)
    places = order.new_full((num_reqs, width), num_nodes)
    places.scatter_(1, order, torch.where(kept, nodes, num_nodes))
    parents = candidates.parents.gather(1, order)
    above = places.gather(1, parents.clamp_min(0))
    parents = torch.where(parents == ROOT, ROOT, above)
    # Where a request can have fewer candidates than nodes.
    missing = 0, num_nodes - order.shape[1]
    pad = torch.nn.functional.pad
    return DeviceTree(
        pad(torch.where(kept, candidates.tokens.gather(1, order), 0), missing),
        pad(torch.where(kept, parents, NO_NODE).int(), missing, value=NO_NODE),
        pad(torch.where(kept, scores, -torch.inf), missing, value=-torch.inf),
        places,
    )


def given(
    tree: DeviceTree, columns: torch.Tensor, sources: Sequence[DeviceCandidates]
) -> torch.Tensor:
    """[R, Q, N] scores that each source gave each node, -inf where it gave none.

    Args:
        tree: Of the union.
        columns: What `merged` returns beside it.
        sources: What was merged.
    """
    if len(sources) == 1:
        return tree.scores[:, None]
    num_reqs, num_nodes = tree.tokens.shape
    places, first, found = tree.places.gather(1, columns), 0, []
    for source in sources:
        end = first + source.tokens.shape[1]
        own = source.scores.new_full((num_reqs, num_nodes + 1), -torch.inf)
        # Columns that are no candidates stand for no node: they may not overwrite one.
        place = torch.where(source.scores.isfinite(), places[:, first:end], num_nodes)
        own.scatter_(1, place, source.scores)
        found.append(own[:, :num_nodes])
        first = end
    return torch.stack(found, dim=1)


def depths_and_bits(
    parents: torch.Tensor, max_depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depths [R, N + 1] int32 and visibility [R, N + 1, W] int64 of all rows.

    Args:
        parents: [R, N] int32; what is no node sees the root and itself, at depth 1.
        max_depth: No node is deeper.
    """
    num_reqs, num_nodes = parents.shape
    above = torch.nn.functional.pad(parents.long().clamp_min(ROOT) + 1, (1, 0))
    rows = torch.arange(num_nodes + 1, device=parents.device)
    words = torch.arange(num_words(num_nodes + 1), device=parents.device) * WORD_BITS
    place = rows[:, None] - words
    inside = (place >= 0) & (place < WORD_BITS)
    own = torch.where(inside, 1 << place.clamp(0, WORD_BITS - 1), 0)
    bits = own.expand(num_reqs, -1, -1) | own[0]
    depths = (above.new_zeros(num_reqs, num_nodes + 1) + (rows > 0)).int()
    # What is known of each row's ancestors doubles every time.
    for _ in range((max_depth - 1).bit_length()):
        bits = bits | bits.gather(1, above[:, :, None].expand_as(bits))
        depths = depths + depths.gather(1, above)
        above = above.gather(1, above)
    return depths, bits


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

    def write(self, slots: torch.Tensor, tree: DeviceTree) -> None:
        """Store the trees of R requests; several may be padding."""
        depths, bits = depths_and_bits(tree.parents, self.max_depth)
        self.tokens[slots] = tree.tokens
        self.parents[slots] = tree.parents
        self.depths[slots] = depths
        self.bits[slots] = bits

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
