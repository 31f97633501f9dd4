"""Passes over the last rows of texts, laid out by the Triton kernel."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SEEDS = range(40)
SLOTS, BLOCK_SIZE, PAD = 7, 4, -1


class Case:
    """Texts of all lengths, some of them shorter than the pass."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.num_reqs, self.num_rows = rng.integers(1, 6), int(rng.integers(1, 12))
        self.lookahead = int(rng.integers(0, 2))
        self.slots = rng.permutation(SLOTS)[: self.num_reqs]
        self.grows = rng.random(self.num_reqs) < 0.8
        # No text may be as long as some passes.
        self.max_len = 60 if seed % 5 else 7
        # A text is at least as long as what its last step has brought.
        high = self.max_len + 1 if seed % 2 else min(14, self.max_len)
        self.lengths = rng.integers(1, high, SLOTS).astype(np.int32)
        most = np.minimum(self.lengths[self.slots], self.num_rows)
        self.num_new = rng.integers(0, most + 1)
        self.texts = rng.integers(0, 999, (SLOTS, self.max_len), np.int32)
        self.table = rng.integers(
            0, 99, (SLOTS, -(-self.max_len // BLOCK_SIZE)), np.int32
        )

    def expected(self) -> dict[str, np.ndarray]:
        """Of each row what the pass is told, and each request's last row."""
        rows: dict[str, list] = {name: [] for name in NAMES}
        for i, slot in enumerate(self.slots.tolist()):
            end = int(self.lengths[slot]) if self.grows[i] else 0
            end -= self.lookahead
            first = max(end - self.num_rows, 0)
            for row in range(self.num_rows):
                position = first + row
                is_new = end - self.num_new[i] <= position < end
                at = min(position, self.max_len - self.lookahead - 1)
                block, place = divmod(at, BLOCK_SIZE)
                kv_slot = self.table[slot, block] * BLOCK_SIZE + place
                rows["tokens"].append(self.texts[slot, at + self.lookahead])
                rows["positions"].append(at)
                rows["kv_slots"].append(kv_slot if is_new else PAD)
            rows["slots"].append(slot)
            rows["seq_lens"].append(max(end, 0))
            last = max(end - 1 - first, 0)
            rows["last"].append(i * self.num_rows + last)
        return {name: np.array(values) for name, values in rows.items()}


NAMES = ("slots", "seq_lens", "tokens", "positions", "kv_slots", "last")


def laid_out(case: Case, device: str) -> dict[str, torch.Tensor]:
    """The same by the kernel."""
    from vllm_specinfer.drafting.text_copies import Texts
    from vllm_specinfer.kernels.triton.catch_up import lay_out_last_rows

    def garbage(num: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num,), 77, dtype=dtype, device=device)

    def there(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    num_reqs = int(case.num_reqs)
    total = num_reqs * case.num_rows
    rows: Any = SimpleNamespace(
        slots=garbage(num_reqs, torch.int64),
        seq_lens=garbage(num_reqs, torch.int32),
        tokens=garbage(total, torch.int32),
        positions=garbage(total, torch.int64),
        kv_slots=garbage(total, torch.int64),
    )
    last = garbage(num_reqs, torch.int64)
    texts = Texts(there(case.texts), there(case.lengths))
    lay_out_last_rows(
        *(rows, last, there(case.slots), there(case.grows), there(case.num_new)),
        *(texts, (there(case.table), BLOCK_SIZE), case.lookahead),
    )
    return {**vars(rows), "last": last}


def outputs(device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """All cases."""
    return [laid_out(Case(seed), device) for seed in SEEDS]
