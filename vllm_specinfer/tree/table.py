"""The live tree of every request slot, and what a verification step makes of them.

Dimension legend: S request slots, N nodes per request without the root, W 64-bit
words per bit row, R requests of a step, T flat query rows of a step.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from vllm_specinfer.device import stage
from vllm_specinfer.tree.candidates import FinishedTrees
from vllm_specinfer.tree.proposals import Draws, joined
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import (
    ancestor_bits,
    node_depths,
    num_words,
)

NO_TREE = -1


def are_trees(num_drafts: np.ndarray, query_start_loc: np.ndarray) -> np.ndarray:
    """[R] requests that have scheduled nodes, and rows for nothing else."""
    starts = query_start_loc[: len(num_drafts) + 1]
    return (num_drafts > 0) & (starts[1:] - starts[:-1] == num_drafts + 1)


class TreeTable:
    """Structure-of-arrays rows, one per request slot.

    A slot's tree is live for exactly one verification: the step whose root sits at
    `root_positions[slot]`. Everything else the scheduler may send as drafts
    (placeholders, leftovers of a preempted request) finds no live tree.
    """

    def __init__(self, max_num_reqs: int, num_nodes: int) -> None:
        self.num_nodes = num_nodes
        # [S, N] int64 / [S, N] int32 / [S, N + 1] int32
        # [S, N + 1, W] int64 / [S] int64
        self.tokens = np.zeros((max_num_reqs, num_nodes), np.int64)
        self.parents = np.zeros((max_num_reqs, num_nodes), np.int32)
        self.depths = np.zeros((max_num_reqs, num_nodes + 1), np.int32)
        words = num_words(num_nodes + 1)
        self.bits = np.zeros((max_num_reqs, num_nodes + 1, words), np.int64)
        self.root_positions = np.full(max_num_reqs, NO_TREE, np.int64)
        # Per slot the draws below each node (`ROOT` is one), by source.
        self.draws: list[dict[int, list[Draws]]] = [{} for _ in range(max_num_reqs)]

    def drop(self, slots: np.ndarray | int) -> None:
        """Forget the trees of these slots."""
        self.root_positions[slots] = NO_TREE

    def write(
        self,
        slots: np.ndarray,
        trees: FinishedTrees,
        root_positions: np.ndarray,
        draws: list[dict[int, list[Draws]]],
    ) -> None:
        """Store new trees.

        Args:
            slots: [R] request slots.
            trees: Theirs.
            root_positions: [R] position of each root, the last verified token.
            draws: [R] by node and source; nodes without draws are left out.
        """
        self.tokens[slots] = trees.tokens
        self.parents[slots] = trees.parents
        rows = 1 + max(trees.sizes, default=0)
        parents = trees.parents[:, : rows - 1]
        self.depths[slots, :rows] = node_depths(parents)
        bits = ancestor_bits(parents)
        # Rows of these words see nothing in the others.
        self.bits[slots, :rows, : bits.shape[2]] = bits
        self.root_positions[slots] = root_positions
        for slot, of_request in zip(slots.tolist(), draws, strict=True):
            self.draws[slot] = of_request

    def plan_step(
        self,
        slots: np.ndarray,
        num_drafts: np.ndarray,
        query_start_loc: np.ndarray,
        num_computed: np.ndarray,
    ) -> "StepPlan | None":
        """Lay the live trees of a batch over its query rows.

        Args:
            slots: [R] request slots.
            num_drafts: [R] scheduled nodes per request, a prefix of each tree.
            query_start_loc: [R + 1] first flat row of each request.
            num_computed: [R] tokens computed before this step.

        Returns:
            The plan, or None where no request has a live tree.
        """
        is_tree = are_trees(num_drafts, query_start_loc)
        is_tree &= self.root_positions[slots] == num_computed
        if True not in is_tree.tolist():
            return None
        return StepPlan(
            is_tree=is_tree,
            slots=slots,
            num_rows=np.where(is_tree, num_drafts + 1, 0),
            query_start_loc=query_start_loc,
            root_positions=num_computed,
            table=self,
        )


class WalkedTrees(NamedTuple):
    """The trees of a step, as they are walked down on the device.

    Attributes:
        first: [R] int64 where the rows begin that are sampled for each request.
        num_rows: [R] int32 rows of its tree, the root included; 0 without tree.
        slots: [R] int64 row of each request's tree in what follows.
        tokens: [X, N] int64.
        parents: [X, N] int32, `ROOT` for the root's children.
    """

    first: torch.Tensor
    num_rows: torch.Tensor
    slots: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor


@dataclass(frozen=True)
class StepRows:
    """Which rows of one target step form trees.

    Attributes:
        is_tree: [R] bool.
        slots: [R] request slots.
        num_rows: [R] rows of the scheduled tree, the root included; 0 without tree.
        query_start_loc: [R + 1] first flat row of each request.
    """

    is_tree: np.ndarray
    slots: np.ndarray
    num_rows: np.ndarray
    query_start_loc: np.ndarray

    @property
    def all_tree(self) -> bool:
        """Every request of the step has a live tree."""
        return len(self.tree_requests) == len(self.is_tree)

    @property
    def num_sampled(self) -> np.ndarray:
        """[R] rows that are sampled at most: of a tree all, else one."""
        return np.maximum(self.num_rows, 1)

    @property
    def first_sampled(self) -> np.ndarray:
        """[R] where they begin, one request after the other."""
        counts = self.num_sampled
        return np.cumsum(counts) - counts

    @functools.cached_property
    def tree_requests(self) -> list[int]:
        """Batch indices of the requests with a live tree."""
        return self.is_tree.nonzero()[0].tolist()


@dataclass(frozen=True)
class StepPlan(StepRows):
    """Trees that the host knows.

    Attributes:
        root_positions: [R] position of the root, which is also the number of
            committed positions before it.
        table: Where the trees live.
    """

    root_positions: np.ndarray
    table: TreeTable

    def paths(self, i: int) -> list[list[int]]:
        """Of each row of a request the rows from depth 1 down to it; only the root's
        (none) where it has no live tree."""
        paths: list[list[int]] = [[]]
        if self.is_tree[i]:
            parents = self.table.parents[self.slots[i], : self.num_rows[i] - 1]
            for row, parent in enumerate(parents.tolist(), start=1):
                paths.append([*paths[parent + 1], row])
        return paths

    def tree_rows(self, device: torch.device, num_rows: int) -> TreeRows:
        """What attention needs to know of so many flat rows."""
        staged = stage(
            device,
            self.is_tree,
            self.root_positions.astype(np.int32),
            self.ancestor_bits(num_rows),
        )
        return TreeRows(*staged, all_tree=self.all_tree)

    def write_positions(self, positions: torch.Tensor) -> None:
        """`positions` to the device, and zeros behind them.

        Args:
            positions: [T'] int64, T' >= T; written.
        """
        (planned,) = stage(positions.device, self.positions())
        positions[: len(planned)].copy_(planned, non_blocking=True)
        positions[len(planned) :].zero_()

    def walked_trees(self, device: torch.device) -> WalkedTrees:
        """The trees on the device."""
        staged = stage(
            device,
            self.first_sampled,
            self.num_rows.astype(np.int32),
            np.arange(len(self.slots)),
            self.table.tokens[self.slots],
            self.table.parents[self.slots],
        )
        return WalkedTrees(*staged)

    def draws(self, i: int, row: int) -> Draws | None:
        """What was drawn for the children of a request's row."""
        found = self.table.draws[self.slots[i]].get(row - 1) if self.is_tree[i] else []
        return joined(found) if found else None

    @property
    def max_depth(self) -> int:
        """At least that of the scheduled trees."""
        return int(self.table.depths[self.slots].max())

    def positions(self) -> np.ndarray:
        """[T] int64 positions of all rows; siblings share one."""
        starts = self.query_start_loc[: len(self.slots) + 1]
        requests = zip(
            *(self.is_tree, self.slots, starts[1:] - starts[:-1], self.root_positions),
            strict=True,
        )
        rows = [
            first + (self.table.depths[slot, :count] if is_tree else np.arange(count))
            for is_tree, slot, count, first in requests
        ]
        return np.concatenate(rows, dtype=np.int64)

    def ancestor_bits(self, num_rows: int) -> np.ndarray:
        """[num_rows, W] int64 visibility of flat rows, zero outside trees."""
        bits = np.zeros((num_rows, self.table.bits.shape[2]), np.int64)
        for i in self.tree_requests:
            start, rows = self.query_start_loc[i], self.num_rows[i]
            bits[start : start + rows] = self.table.bits[self.slots[i], :rows]
        return bits
