"""What a verification step makes of trees that only the device knows.

Dimension legend: S request slots, R requests of a step, T flat query rows.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specinfer.device import stage
from vllm_specinfer.kernels.triton.step_rows import (
    Step,
    write_positions,
    write_visibility,
)
from vllm_specinfer.tree.on_device import TreeBuffers
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.table import StepRows, WalkedTrees, are_trees


@dataclass(frozen=True)
class DevicePlan(StepRows):
    """`StepPlan` of which the host knows no more than how many rows there are.

    Rows that are no nodes follow a tree's last one; no walk comes to them.

    Attributes:
        buffers: Where the trees live.
        step: What the device knows of the step.
        first: [R] int64 `StepRows.first_sampled`, on the device.
    """

    buffers: TreeBuffers
    step: Step
    first: torch.Tensor

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
        rows = StepRows(
            is_tree=is_tree,
            slots=batch.idx_mapping_np,
            num_rows=np.where(is_tree, num_drafts + 1, 0).astype(np.int32),
            query_start_loc=starts,
        )
        slots = batch.idx_mapping
        num_rows, first = stage(slots.device, rows.num_rows, rows.first_sampled)
        step = Step(slots, batch.query_start_loc, num_rows, num_computed)
        known = {field.name: getattr(rows, field.name) for field in fields(rows)}
        return cls(**known, buffers=buffers, step=step, first=first)

    def paths(self, i: int) -> list[list[int]]:
        """As `StepPlan.paths`, but of each path only the end is true."""
        return [[], *([row] for row in range(1, self.num_rows[i]))]

    @property
    def max_depth(self) -> int:
        """No node is deeper."""
        return self.buffers.max_depth

    def tree_rows(self, device: torch.device, num_rows: int) -> "DevicePlan":
        """As `StepPlan.tree_rows`; these are written where attention reads them."""
        return self

    def write_to(self, trees: TreeRows) -> None:
        """As `TreeRows.write_to`, before the step is run."""
        write_visibility(trees, self.step, self.buffers)

    def write_positions(self, positions: torch.Tensor) -> None:
        """As `StepPlan.write_positions`, before the step is run."""
        write_positions(positions, self.step, self.buffers)

    def walked_trees(self, device: torch.device) -> WalkedTrees:
        """As `StepPlan.walked_trees`."""
        return WalkedTrees(
            self.first,
            self.step.num_rows,
            self.step.slots,
            self.buffers.tokens,
            self.buffers.parents,
        )
