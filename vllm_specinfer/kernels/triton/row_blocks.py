"""Which query rows the programs of tree attention attend, known to the device alone.

Dimension legend: R requests, T query rows, P programs of a KV head.
"""

from dataclasses import dataclass

import torch


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
        attended: torch.Tensor | None = None,
    ) -> None:
        """Blocks of the rows of a step, where captured graphs find them.

        Args:
            query_start_loc: [R + 1] int32.
            rows_per_block: Rows of one.
            attended: [R] bool which requests have any; all by default.
        """
        counts = (query_start_loc.diff() + (rows_per_block - 1)) // rows_per_block
        if attended is not None:
            counts = torch.where(attended, counts, 0)
        ends = counts.cumsum(0, dtype=torch.int32)
        block = torch.arange(len(self.requests), dtype=torch.int32, device=ends.device)
        found = torch.searchsorted(ends, block, right=True)
        request = found.clamp_max(len(counts) - 1)
        self.requests.copy_(request)
        self.places.copy_(block - (ends - counts)[request])
        self.count.copy_(ends[-1:])


def max_row_blocks(num_rows: int, num_reqs: int, rows: int) -> int:
    """No more blocks of so many rows have the T rows of R requests."""
    return min(num_rows, num_rows // rows + num_reqs)
