"""Which query rows the programs of tree attention attend, known to the device alone.

Dimension legend: R requests, T query rows, P programs of a KV head.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Requests, or blocks of one, that a program looks at at once.
BLOCK = 128


@dataclass(frozen=True)
class RowBlocks:
    """Which rows each program of a KV head attends, P blocks at most.

    Blocks without rows do no harm.

    Attributes:
        requests: [P] int32 request of each block.
        places: [P] int32 which one of the request's blocks it is.
        count: [1] int32 how many there are.
    """

    requests: torch.Tensor
    places: torch.Tensor
    count: torch.Tensor

    @classmethod
    def room(cls, most: int, device: torch.device) -> "RowBlocks":
        """No blocks, and room for so many."""
        sizes = (most, most, 1)
        return cls(*(torch.zeros(n, dtype=torch.int32, device=device) for n in sizes))

    @classmethod
    def uniform(
        cls, num_reqs: int, per_request: int, device: torch.device
    ) -> "RowBlocks":
        """So many blocks of each of R requests."""
        blocks = torch.arange(num_reqs * per_request, dtype=torch.int32, device=device)
        requests = blocks // per_request
        count = torch.full_like(blocks[:1], len(blocks))
        return cls(requests, blocks - requests * per_request, count)

    def first(self, most: int) -> "RowBlocks":
        """The same, where there are no more than so many."""
        return RowBlocks(self.requests[:most], self.places[:most], self.count)

    def fill(
        self,
        query_start_loc: torch.Tensor,
        rows_per_block: int,
        attended: torch.Tensor,
    ) -> None:
        """Blocks of the rows of a step, where captured graphs find them.

        Args:
            query_start_loc: [R + 1] int32.
            rows_per_block: Rows of one.
            attended: [R] bool which requests have any.
        """
        _row_blocks_kernel[(len(query_start_loc) - 1,)](
            self.requests,
            self.places,
            self.count,
            query_start_loc,
            attended,
            ROWS=rows_per_block,
            BLOCK=BLOCK,
        )


@triton.jit
def _row_blocks_kernel(
    requests_ptr,
    places_ptr,
    count_ptr,
    query_start_loc_ptr,
    attended_ptr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # Blocks of the requests before this one, and its own.
    before = 0
    own = 0
    for first in range(0, r + 1, BLOCK):
        request = first + lanes
        real = request <= r
        start = tl.load(query_start_loc_ptr + request, mask=real, other=0)
        end = tl.load(query_start_loc_ptr + request + 1, mask=real, other=0)
        attended = tl.load(attended_ptr + request, mask=real, other=0) != 0
        counts = tl.where(attended, (end - start + ROWS - 1) // ROWS, 0)
        before += tl.sum(tl.where(request < r, counts, 0))
        own += tl.sum(tl.where(request == r, counts, 0))
    for first in range(0, own, BLOCK):
        place = first + lanes
        real = place < own
        tl.store(requests_ptr + before + place, r, mask=real)
        tl.store(places_ptr + before + place, place, mask=real)
    if r == tl.num_programs(0) - 1:
        tl.store(count_ptr, before + own)


def max_row_blocks(num_rows: int, num_reqs: int, rows: int) -> int:
    """No more blocks of so many rows have the T rows of R requests."""
    return min(num_rows, num_rows // rows + num_reqs)
