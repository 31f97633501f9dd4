"""The blocks of all request slots, as the host knows them."""

import numpy as np
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_specinfer.device import is_host, read, stage


class HostBlocks:
    """One KV cache group's rows of vLLM's block table on the host.

    A slot's row only grows until another request starts in it or its own gives blocks
    back, and vLLM counts its blocks on the host: so the device is read where a count
    has changed.
    """

    def __init__(self, block_tables: BlockTables, group_id: int) -> None:
        """Know nothing.

        Args:
            block_tables: The runner's.
            group_id: Which group.
        """
        self.on_device = block_tables.block_tables[group_id].gpu
        self._counts = block_tables.num_blocks.np[group_id]
        # [S, max_blocks] int32; on a CPU the device's own.
        self.table = np.zeros(self.on_device.shape, np.int32)
        self._known = np.zeros(len(self.table), np.int32)
        self._is_copy = not is_host(self.on_device.device)
        if not self._is_copy:
            (self.table,) = read(self.on_device)

    def forget(self, slot: int) -> None:
        """A request starts in a slot, or has given blocks back."""
        self._known[slot] = 0

    def held(self, slots: np.ndarray) -> np.ndarray:
        """[R] blocks that these slots' requests own."""
        return self._counts[slots]

    def update(self, slots: np.ndarray) -> None:
        """Bring the rows of these slots [R] up to date."""
        if not self._is_copy:
            return
        slots = slots[self._known[slots] != self._counts[slots]]
        if not len(slots):
            return
        most = self._counts[slots].max()
        (rows,) = read(self.rows(slots)[:, :most])
        self.table[slots, :most] = rows
        self._known[slots] = self._counts[slots]

    def rows(self, slots: np.ndarray) -> torch.Tensor:
        """[R, max_blocks] rows of these slots, on the device."""
        return self.on_device[stage(self.on_device.device, slots)[0]]

    def fill(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """The rows of slots [R], both on the device, into rows [R, max_blocks]."""
        torch.index_select(self.on_device, 0, slots, out=rows)
