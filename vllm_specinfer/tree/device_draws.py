"""What the device has drawn children from, until they are tested.

The definitions are `Draws` and `joined`; here all shapes are fixed.

Dimension legend: S request slots, R requests, N nodes of a tree, Q sources, F nodes of
a level per request, K draws per row, M candidates of each, G rows of trees.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm_specinfer.tree.on_device import DeviceTree
from vllm_specinfer.tree.proposals import NO_CANDIDATE, NO_DRAW
from vllm_specinfer.tree.token_tree import ROOT

if TYPE_CHECKING:
    from vllm_specinfer.drafting.device_growth import Level

FLOAT64_BYTES = 8


class RowDraws(NamedTuple):
    """Draws of children, one row for each node.

    Attributes:
        places: [..., K] int64 drawn candidates, `NO_DRAW` where there is none.
        tokens: [..., M] int64 of the candidates.
        q: [..., M] float64 the distribution of the first draw; 0 where there is none.
    """

    places: torch.Tensor
    tokens: torch.Tensor
    q: torch.Tensor


class TestedDraws(NamedTuple):
    """`Draws` on the device.

    Attributes:
        places: [G, K] int64 in the order of their tests, `NO_DRAW` at the end.
        tokens: [G, M] int64, distinct, but for `NO_CANDIDATE`.
        q: [G, K, M] float64, what each draw was made from.
    """

    places: torch.Tensor
    tokens: torch.Tensor
    q: torch.Tensor


class DrawBuffers:
    """The draws below the rows of the device's tree of each request slot.

    All sources' draws count, also those of children that did not come into the tree.
    """

    def __init__(
        self,
        num_slots: int,
        num_nodes: int,
        grown: Sequence[Sequence[RowDraws]],
        replaces: bool,
    ) -> None:
        """Rows without draws.

        Args:
            num_slots: S, and what is there for padding.
            num_nodes: N.
            grown: Of each source the draws of its levels [R * F, ...], as they will be.
            replaces: Whether a source may draw a token again.
        """
        draws = [level for levels in grown for level in levels]
        k = max(level.places.shape[1] for level in draws)
        m = max(level.tokens.shape[1] for level in draws)
        self._replaces = replaces
        # The last row of a tree is for what has none.
        shape = num_slots, num_nodes + 2, len(grown)
        first = draws[0]
        self._kept = RowDraws(
            first.places.new_full((*shape, k), NO_DRAW),
            first.tokens.new_full((*shape, m), NO_CANDIDATE),
            first.q.new_zeros(*shape, m),
        )

    def clear(self, slots: torch.Tensor) -> None:
        """The trees of slots [R] are others from now on."""
        self._kept.places.index_fill_(0, slots, NO_DRAW)

    def write(
        self, slots: torch.Tensor, rows: torch.Tensor, source: int, draws: RowDraws
    ) -> None:
        """Keep the draws of a level.

        Args:
            slots: [R] int64 request slots; several may be padding.
            rows: [R, F] int64 rows of their trees, N + 1 for none.
            source: Its number.
            draws: [R * F, ...].
        """
        for kept, new, nothing in zip(
            self._kept, draws, (NO_DRAW, NO_CANDIDATE, 0), strict=True
        ):
            missing = 0, kept.shape[-1] - new.shape[-1]
            new = torch.nn.functional.pad(new, missing, value=nothing)
            kept[slots[:, None], rows, source] = new.unflatten(0, rows.shape)

    def of(self, slots: torch.Tensor, rows: torch.Tensor) -> TestedDraws:
        """The draws below rows of trees, source by source.

        Args:
            slots: [G] int64 request slots.
            rows: [G] int64 rows of their trees, 0 for the root.
        """
        places, tokens, q = (kept[slots, rows] for kept in self._kept)
        is_draw = places != NO_DRAW
        has_draws = is_draw.any(dim=2, keepdim=True)
        tokens = torch.where(has_draws, tokens, NO_CANDIDATE)
        qs = q.new_empty(*places.shape, q.shape[2])
        for k in range(places.shape[2]):
            qs[:, :, k] = q * is_draw[:, :, k, None]
            if not self._replaces:
                place = places[:, :, k, None].clamp_min(0)
                q = torch.where(is_draw[:, :, k, None], q.scatter(2, place, 0), q)
                total = q.sum(dim=2, keepdim=True)
                q = q / torch.where(total > 0, total, 1)
        return _joined(places, tokens, qs)

    @property
    def bytes_per_row(self) -> int:
        """What `of` needs for each row, at most."""
        *_, num_sources, num_candidates = self._kept.q.shape
        num_draws = self._kept.places.shape[3]
        # All draws over all sources' candidates, and two copies in other orders.
        return 3 * num_sources**2 * num_draws * num_candidates * FLOAT64_BYTES


def rows_of(
    level: "Level", columns: torch.Tensor, first: int, tree: DeviceTree
) -> torch.Tensor:
    """[R, F] rows of the trees that a level's nodes have become, N + 1 for none.

    Args:
        level: Of one source.
        columns: [R, C] columns of the union that all sources' candidates became.
        first: The source's first candidate there.
        tree: Of the union.
    """
    column = columns.gather(1, first + level.columns.clamp_min(0))
    rows = torch.where(level.columns == ROOT, 0, tree.places.gather(1, column) + 1)
    return torch.where(level.is_node, rows, tree.parents.shape[1] + 1)


def _joined(places: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor) -> TestedDraws:
    """The draws of several sources below G nodes; `proposals.joined`.

    Args:
        places: [G, Q, K].
        tokens: [G, Q, M], distinct within a source.
        q: [G, Q, K, M].
    """
    if places.shape[1] > 1:
        ordered, order = tokens.flatten(1).sort(dim=1)
        is_new = ordered[:, 1:] != ordered[:, :-1]
        column = torch.nn.functional.pad(is_new.long().cumsum(1), (1, 0))
        columns = torch.empty_like(order).scatter_(1, order, column)
        columns = columns.view(tokens.shape)
        spread = q.new_zeros(*q.shape[:3], ordered.shape[1])
        q = spread.scatter_add_(3, columns[:, :, None].expand_as(q), q)
        found = columns.gather(2, places.clamp_min(0))
        places = torch.where(places == NO_DRAW, NO_DRAW, found)
        tokens = torch.full_like(ordered, NO_CANDIDATE).scatter_(1, column, ordered)
    places, tokens, q = places.flatten(1), tokens.flatten(1), q.flatten(1, 2)
    order = (places == NO_DRAW).sort(dim=1, stable=True).indices
    q = q.gather(1, order[:, :, None].expand_as(q))
    return TestedDraws(places.gather(1, order), tokens, q)
