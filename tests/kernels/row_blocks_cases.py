"""Steps of any sizes, and the blocks of rows that the kernel cuts them into."""

import numpy as np
import torch

from vllm_specinfer.kernels.triton.row_blocks import RowBlocks, max_row_blocks

SEEDS = range(150)


def step_of(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of each request, which requests are attended, rows of a block.

    Some steps have more requests than a program looks at at once, some requests more
    blocks.
    """
    rng = np.random.default_rng(seed)
    num_reqs = 300 if seed % 50 == 0 else rng.integers(1, 9)
    counts = rng.integers(0, 40, num_reqs) * rng.integers(0, 2, num_reqs)
    if seed % 50 == 1:
        counts[-1] = 700
    attended = rng.random(num_reqs) < rng.choice([0.7, 1])
    return counts, attended, int(rng.choice([1, 3, 16]))


def outputs(device: str = "cpu") -> list[tuple[torch.Tensor, ...]]:
    """Requests, places and count of the blocks of all steps."""
    found = []
    for counts, attended, rows in map(step_of, SEEDS):
        most = max_row_blocks(int(counts.sum()), len(counts), rows)
        blocks = RowBlocks.room(most, torch.device(device))
        starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32, device=device)
        blocks.fill(starts, rows, torch.tensor(attended, device=device))
        found.append((blocks.requests, blocks.places, blocks.count))
    return found
