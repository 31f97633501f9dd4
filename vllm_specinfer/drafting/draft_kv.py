"""What K/V an SSM has of each request, and where.

The SSM's layers live in the target's block table. Its K/V of a request is valid for the
first `num_read` rows; a growing tree uses the slots after the last row as scratch,
which the next catch-up pass overwrites. Row r of a request reads token r + `lookahead`;
its K/V is in slot r.

Requests that started together, or while the SSM sat out, may share blocks that it has
not read: one of them reads these for all.

Dimension legend: S request slots, R requests, F rows of one pass.
"""

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_specinfer.drafting.host_blocks import BlockIds, HostBlocks
from vllm_specinfer.drafting.written_blocks import WrittenBlocks


class DraftKV:
    """The K/V of one SSM, in one KV cache group.

    Attributes:
        blocks: The blocks of all slots.
    """

    def __init__(
        self,
        block_tables: BlockTables,
        group_id: int,
        num_blocks: int,
        max_model_len: int,
        lookahead: int,
    ) -> None:
        """Nothing has been read.

        Args:
            block_tables: The runner's.
            group_id: The KV cache group of the SSM's layers.
            num_blocks: Of the KV cache.
            max_model_len: Tokens that the SSM can read of a text.
            lookahead: Row r reads token r + `lookahead`.
        """
        self.blocks = HostBlocks(block_tables, group_id)
        self._group_id, self._block_size = group_id, block_tables.block_sizes[group_id]
        self._max_model_len, self._lookahead = max_model_len, lookahead
        max_num_reqs = len(self.blocks.table)
        self._written = WrittenBlocks(num_blocks, self._block_size, max_num_reqs)
        self._num_read, self._num_cached = np.zeros((2, max_num_reqs), np.int64)
        # By block: who reads it, of those that were last asked for.
        self._readers = np.zeros(num_blocks, np.int64)
        self._follows = np.zeros(max_num_reqs, bool)

    def forget(self) -> None:
        """The KV cache has lost what was in it; no request runs."""
        self._written.forget_all()

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; cached blocks may hold the SSM's K/V, too."""
        self._follows[slot] = False
        self.blocks.start(slot, request.block_ids)
        self._num_cached[slot] = num_cached = request.num_computed_tokens
        first, last = self._lookahead, num_cached + self._lookahead
        cached = request.prefill_token_ids[first:last]
        self._num_read[slot] = self._written.start(
            slot, request.block_ids[self._group_id], cached
        )

    def append(self, slot: int, block_ids: BlockIds) -> None:
        """A slot's request gets blocks."""
        self.blocks.append(slot, block_ids)
        self._written.forget(block_ids[self._group_id])

    def limits(self, slots: np.ndarray) -> np.ndarray:
        """[R] rows that the request owns K/V slots for."""
        held = self.blocks.held(slots) * self._block_size
        return np.minimum(held, self._max_model_len)

    def capacity(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[R] scratch slots after the last row that the request owns."""
        return self.limits(slots) - num_tokens + self._lookahead

    def num_unread(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        """Tokens of texts of so many [R] that no pass has read yet; those that requests
        share count for each of them."""
        found = zip(num_tokens.tolist(), self._num_read[slots].tolist(), strict=True)
        return sum(max(num - self._lookahead - read, 0) for num, read in found)

    def unread(
        self, slots: np.ndarray, num_rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where each request begins to read, and who reads first.

        vLLM caches blocks before anything is in them: what several requests hold is
        read for the one that the target computed it for, which holds the fewest cached
        ones. The others attend to it in the same pass, as in the target's. Where row r
        reads token r + 1, the last row may have read another text's.

        Args:
            slots: [R] their slots.
            num_rows: [R] rows that they read up to.

        Returns:
            [R] indices of the requests in the order to read them in, [R] first row of
            each request.
        """
        first, cached = self._num_read[slots], self._num_cached[slots]
        behind = first < cached
        if not behind.any():
            return np.arange(len(slots)), first
        order = np.where(behind, cached, 0).argsort(kind="stable")
        blocks = np.arange(cached.max() // self._block_size)
        table = self.blocks.table[slots[order], : len(blocks)]
        places = np.broadcast_to(np.arange(len(slots))[:, None], table.shape)
        whole = blocks < (num_rows[order] // self._block_size)[:, None]
        # Backwards: the last to write here is the first to read.
        self._readers[table[whole][::-1]] = places[whole][::-1]
        others = (self._readers[table] != places) | self._written.are_known(table)
        own = blocks < (first[order] // self._block_size)[:, None]
        there = np.logical_and.accumulate(own | (whole & others), axis=1).sum(axis=1)
        there = np.minimum(there * self._block_size, cached[order])
        first[order] = np.maximum(first[order], there)
        return order, first

    def has_read(self, slot: int, num_tokens: int, tokens: np.ndarray) -> None:
        """The K/V of a request's text, of so many tokens, has been written.

        Args:
            slot: Its slot.
            num_tokens: How many.
            tokens: [max_model_len] int32, its text first.
        """
        first, num_rows = self._num_read[slot], num_tokens - self._lookahead
        self._num_read[slot] = num_rows
        if first // self._block_size < num_rows // self._block_size:
            known = tokens[self._lookahead : num_tokens]
            self._written.complete(slot, self.blocks.table[slot], known)

    def keep_up(self, slots: np.ndarray) -> None:
        """All that is known of these requests is being read."""
        self._follows[slots] = True

    def fall_behind(self, slots: np.ndarray) -> None:
        """These requests go on without the SSM."""
        self._follows[slots] = False

    def follows(self, slots: np.ndarray) -> bool:
        """All of these requests that the SSM has not read is what their last step
        brought."""
        return bool(self._follows[slots].all())

    def kv_slots(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV cache slots of flat positions; PAD where the request owns none.

        Args:
            slots: [F] of each row's request.
            positions: [F] of the rows.
        """
        inside = positions < self.limits(slots)
        safe = np.where(inside, positions, 0)
        blocks = self.blocks.table[slots, safe // self._block_size].astype(np.int64)
        kv_slots = blocks * self._block_size + safe % self._block_size
        return np.where(inside, kv_slots, PAD_SLOT_ID)

    @property
    def paging(self) -> tuple[torch.Tensor, int]:
        """[S, max_blocks] int32 blocks of all slots on the device, and their size."""
        return self.blocks.on_device, self._block_size
