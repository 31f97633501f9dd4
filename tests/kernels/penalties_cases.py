"""Rows of trees under penalties, and vLLM's kernel along each row's path."""

import numpy as np
import torch

SEEDS = range(12)
SLOTS, VOCAB = 5, 5000
# Frequent tokens repeat themselves on a path, in a prompt and behind it.
FREQUENT = 12


def penalised(seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[L, V] logits by the kernel, and by vLLM's."""
    from vllm.v1.worker.gpu.sample.penalties import apply_penalties

    from vllm_specinfer.kernels.triton.penalties import path_penalties

    rng = np.random.default_rng(seed)
    num_rows, depth = int(rng.integers(1, 12)), int(rng.integers(1, 9))

    def on(values: np.ndarray, kind: type = np.int32) -> torch.Tensor:
        return torch.from_numpy(values.astype(kind)).to(device)

    def some_of(neutral: float, values: list[float]) -> torch.Tensor:
        return on(rng.choice([neutral, *values], SLOTS), np.float32)

    penalties = (
        some_of(1.0, [1.3, 0.8]),
        some_of(0.0, [0.5, -0.25]),
        some_of(0.0, [0.75, -0.5]),
    )
    bits = np.zeros((SLOTS, -(-VOCAB // 32)), np.int64)
    bits[:, 0] = rng.integers(0, 1 << FREQUENT, SLOTS)
    counts = np.zeros((SLOTS, VOCAB), np.int32)
    counts[:, :FREQUENT] = rng.integers(0, 3, (SLOTS, FREQUENT))
    state = on(bits), on(counts)
    slots, lengths = (
        rng.integers(0, SLOTS, num_rows),
        rng.integers(0, depth + 1, num_rows),
    )
    paths = np.where(
        np.arange(depth) < lengths[:, None],
        rng.choice([*range(FREQUENT), 4097, VOCAB - 1], (num_rows, depth)),
        -1,
    )
    logits = on(rng.normal(size=(num_rows, VOCAB)) * 3, np.float32)
    expected = []
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        # The row of the root, with any token, comes first.
        chain = logits[row].repeat(length + 1, 1)
        apply_penalties(
            chain,
            on(np.full(length + 1, slot)),
            on(np.append(0, paths[row, :length])),
            on(np.arange(length + 1)),
            *penalties,
            *state,
        )
        expected.append(chain[-1])
    path_penalties(logits, on(slots), on(paths), *penalties, *state)
    return logits.cpu(), torch.stack(expected).cpu()


def outputs(device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """All cases."""
    return [penalised(seed, device) for seed in SEEDS]
