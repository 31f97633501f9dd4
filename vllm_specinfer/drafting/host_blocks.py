"""The blocks of all request slots, as the host knows them."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_specinfer.device import stage

# Of each KV cache group.
BlockIds = Sequence[Sequence[int]]


class HostBlocks:
    """One KV cache group's rows of vLLM's block table on the host.

    The scheduler tells the worker of new blocks, which writes them to the device: the
    same ids are written here, so that nobody has to read the device.

    Attributes:
        on_device: [S, max_blocks] vLLM's table.
        table: [S, max_blocks] int32, valid for as many blocks as a slot holds.
    """

    def __init__(self, block_tables: BlockTables, group_id: int) -> None:
        """Know nothing.

        Args:
            block_tables: The runner's.
            group_id: Which group.
        """
        self.on_device = block_tables.block_tables[group_id].gpu
        self.table = np.zeros(self.on_device.shape, np.int32)
        self._group_id = group_id
        self._counts = block_tables.num_blocks.np[group_id]

    def start(self, slot: int, block_ids: BlockIds) -> None:
        """A request with these blocks starts in a slot."""
        self._write(slot, 0, block_ids)

    def append(self, slot: int, block_ids: BlockIds) -> None:
        """A slot's request gets blocks; vLLM's table does not have them yet."""
        self._write(slot, self._counts[slot], block_ids)

    def _write(self, slot: int, first: int, block_ids: BlockIds) -> None:
        own = block_ids[self._group_id]
        self.table[slot, first : first + len(own)] = own

    def held(self, slots: np.ndarray) -> np.ndarray:
        """[R] blocks that these slots' requests own."""
        return self._counts[slots]

    def rows(self, slots: np.ndarray) -> torch.Tensor:
        """[R, max_blocks] rows of these slots, on the device."""
        return self.on_device[stage(self.on_device.device, slots)[0]]

    def fill(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """The rows of slots [R], both on the device, into rows [R, max_blocks]."""
        torch.index_select(self.on_device, 0, slots, out=rows)
