"""Logits of random rows, and what the Triton kernel and the definition find in them."""

import numpy as np
import torch

SEEDS = range(60)
Found = tuple[torch.Tensor, torch.Tensor]


def rows_of(seed: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits [F, V], tokens [V] of their columns, and how many are wanted.

    Logits are the same or an eighth apart, so that no rounding changes their order.
    """
    rng = np.random.default_rng(seed)
    num_rows = int(rng.choice([1, 2, 33]))
    num_columns = int(rng.integers(1, rng.choice([5, 40, 300, 3000])))
    if seed == 0:
        num_columns = 32000
    most = rng.choice([8, 200])
    logits = rng.integers(-most, most, (num_rows, num_columns)) / 8
    logits[rng.random(logits.shape) < rng.choice([0, 0.3, 0.98])] = -np.inf
    if seed % 4 == 3:
        some = rng.integers(0, num_columns, num_rows)
        logits[np.arange(num_rows), some] = rng.choice([np.nan, np.inf, 5], num_rows)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    # Rows of a wider matrix, whose last columns are padding.
    padding = int(rng.choice([0, 0, 7]))
    wide = np.pad(logits, ((0, 0), (0, padding)), constant_values=999)
    ids = np.sort(rng.choice(10**6, num_columns, replace=False))
    count = int(rng.integers(1, min(16, num_columns) + 1))
    wide = torch.from_numpy(wide).to(dtype)
    return wide[:, :num_columns], torch.from_numpy(ids), count


def defined(logits: torch.Tensor, ids: torch.Tensor, count: int) -> Found:
    """In descending order; of equally likely ones the first."""
    logprobs = logits.float().log_softmax(dim=-1)
    values, places = logprobs.sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids[places[:, :count]]


def outputs(device: str = "cpu") -> list[tuple[Found, Found]]:
    """What the kernel finds and what it should."""
    from vllm_specinfer.kernels.triton import likeliest as kernel

    found = []
    for logits, ids, count in map(rows_of, SEEDS):
        assert kernel.takes(logits, count)
        ours = kernel.likeliest(logits.to(device), ids.to(device), count)
        found.append((ours, defined(logits, ids, count)))
    return found
