"""Unions of several sources' candidates by the Triton kernel, and the definition's.

``TRITON_INTERPRET=1 python union_cases.py OUTPUT.pt`` saves both.
"""

import sys
from itertools import accumulate

import interpreter
import numpy as np
import torch

SEEDS = range(60)
VOCAB = 5


def grown(
    rng: np.random.Generator, num_reqs: int, most: int
) -> tuple[tuple[np.ndarray, ...], list[int]]:
    """Candidates by level, siblings of distinct tokens, and `ends`."""
    sizes = rng.integers(1, most, rng.integers(1, 5)).tolist()
    ends = list(accumulate(sizes))
    tokens = np.zeros((num_reqs, ends[-1]), np.int64)
    parents = np.full(tokens.shape, -1)
    scores = np.full(tokens.shape, -np.inf, np.float32)
    for r in range(num_reqs):
        seen = set()
        for start, end, depth in zip([0, *ends], ends, range(9), strict=False):
            for c in range(start, end):
                first = 0 if depth < 2 else ends[depth - 2]
                parent = int(rng.integers(first, start)) if depth else -1
                above = scores[r, parent] if depth else 0.0
                token = int(rng.integers(VOCAB))
                known = (parent, token) in seen or not np.isfinite(above)
                tokens[r, c], parents[r, c] = token, parent
                if not known and rng.random() < 0.8:
                    seen.add((parent, token))
                    scores[r, c] = above - rng.integers(1, 4) / 4
    return (tokens, parents, scores), ends


def union(seed: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel and the definition give."""
    from vllm_specinfer.kernels.triton.union import Union
    from vllm_specinfer.tree.on_device import DeviceCandidates, merged

    rng = np.random.default_rng(seed)
    num_reqs, most = int(rng.integers(1, 4)), int(rng.choice([3, 7, 45]))
    pairs = [grown(rng, num_reqs, most) for _ in range(rng.integers(1, 4))]
    sources = [
        DeviceCandidates(*(torch.from_numpy(a).to(device) for a in arrays), ends)
        for arrays, ends in pairs
    ]
    ends = [source.ends for source in sources]
    found, columns = Union(ends, torch.device(device)).of(sources)
    expected, expected_columns = merged(sources)
    return [
        (ours.cpu(), theirs.cpu())
        for ours, theirs in (
            (columns, expected_columns),
            (found.tokens, expected.tokens),
            (found.parents, expected.parents),
            (found.scores, expected.scores),
        )
    ]


def run(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All cases."""
    return [union(seed, device) for seed in SEEDS]


def main() -> None:
    """Save what the kernel and the definition give, run by Triton's interpreter."""
    interpreter.prepare()
    torch.save(run(), sys.argv[1])


if __name__ == "__main__":
    main()
