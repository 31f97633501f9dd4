"""What a verification step makes of trees that only the device knows.

Dimension legend: S request slots, R requests of a step, T flat query rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specinfer.device import stage
from vllm_specinfer.tree.on_device import TreeBuffers
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.table import StepRows, are_trees


@dataclass(frozen=True)
class DevicePlan(StepRows):
    """`StepPlan` of which the host knows no more than how many rows there are.

    Rows that are no nodes follow a tree's last one; no walk comes to them.

    Attributes:
        batch: The step's batch.
        buffers: Where the trees live.
        rows: [T] int64 slot and [T] int64 row of its tree for each flat row, on the
            device; rows that are in no tree are roots.
        num_computed: [R] int32 positions of the roots.
    """

    batch: InputBatch
    buffers: TreeBuffers
    rows: tuple[torch.Tensor, torch.Tensor]
    num_computed: torch.Tensor

    @classmethod
    def of(
        cls,
        batch: InputBatch,
        has_tree: np.ndarray,
        buffers: TreeBuffers,
        num_computed: torch.Tensor,
    ) -> "DevicePlan | None":
        """Lay the trees of a batch over its query rows.

        Args:
            batch: The step's batch.
            has_tree: [R] whether a tree was drafted for the request.
            buffers: Where the trees live.
            num_computed: [S] int32 tokens computed before this step, on the device.

        Returns:
            The plan, or None where no request has a tree.
        """
        starts, num_drafts = batch.query_start_loc_np, batch.num_draft_tokens_per_req
        is_tree = has_tree & are_trees(num_drafts, starts)
        if not is_tree.any():
            return None
        slots = batch.idx_mapping_np
        counts = np.diff(starts[: len(slots) + 1])
        in_tree = np.repeat(is_tree, counts)
        local = np.arange(len(in_tree)) - np.repeat(starts[: len(slots)], counts)
        rows = stage(
            batch.idx_mapping.device,
            np.repeat(slots, counts).astype(np.int64),
            np.where(in_tree, local, 0),
        )
        return cls(
            is_tree=is_tree,
            slots=slots,
            num_rows=np.where(is_tree, num_drafts + 1, 0),
            query_start_loc=starts,
            batch=batch,
            buffers=buffers,
            rows=rows,
            # A copy: the step changes it.
            num_computed=num_computed[batch.idx_mapping],
        )

    def paths(self, i: int) -> list[list[int]]:
        """As `StepPlan.paths`, but of each path only the end is true."""
        return [[], *([row] for row in range(1, self.num_rows[i]))]

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return self.buffers.max_depth

    def tree_rows(self, device: torch.device, num_rows: int) -> TreeRows:
        """As `StepPlan.tree_rows`."""
        slots, local = self.rows
        return TreeRows(
            stage(device, self.is_tree)[0],
            self.num_computed,
            self.buffers.bits[slots, local],
            all_tree=self.all_tree,
        )

    def positions_on(self, device: torch.device) -> torch.Tensor:
        """[T] int64 positions of all rows; siblings share one."""
        slots, local = self.rows
        flat = self.batch.positions[: len(slots)]
        # A row's flat position is its root's and its place below it.
        return flat - local + self.buffers.depths[slots, local]

    def drafts_and_parents(
        self, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `StepPlan.drafts_and_parents`; a root's token is any."""
        counts = np.maximum(self.num_rows, 1)
        nodes = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        slots, nodes = stage(
            device,
            np.repeat(self.slots, counts).astype(np.int64),
            np.maximum(nodes - 1, 0),
        )
        parents = self.buffers.parents[self.batch.idx_mapping]
        return self.buffers.tokens[slots, nodes], parents
