"""Trees of the best candidates by the Triton kernels, and by the definition in torch.

``TRITON_INTERPRET=1 python trees_cases.py OUTPUT.pt`` saves both.
"""

import sys

import interpreter
import numpy as np
import torch

SEEDS = range(60)
VOCAB, SLOTS = 5, 6


def candidates(rng: np.random.Generator, num_reqs: int, width: int) -> tuple:
    """Tokens, parents and scores: ties, columns that are none, no better children."""
    parents = np.full((num_reqs, width), -1)
    scores = np.full((num_reqs, width), -np.inf, np.float32)
    for r in range(num_reqs):
        for c in range(width):
            parents[r, c] = rng.integers(-1, c) if c else -1
            above = 0.0 if parents[r, c] < 0 else scores[r, parents[r, c]]
            if rng.random() < 0.85:
                scores[r, c] = above - rng.integers(0, 3) / 4
    return rng.integers(0, VOCAB, parents.shape), parents, scores


def trees(seed: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What kernels and definition leave behind."""
    from vllm_specinfer.kernels.triton.trees import best_trees
    from vllm_specinfer.tree.on_device import DeviceCandidates, TreeBuffers, best

    rng = np.random.default_rng(seed)
    num_reqs, width = int(rng.integers(1, 4)), int(rng.integers(1, 150))
    num_nodes = int(rng.choice([1, 3, 8, 20, 130]))
    least = float(rng.choice([-np.inf, -1.0]))
    on = torch.device(device)
    arrays = (torch.from_numpy(a).to(on) for a in candidates(rng, num_reqs, width))
    found = DeviceCandidates(*arrays, ends=())
    slots = torch.from_numpy(rng.permutation(SLOTS)[:num_reqs]).to(on)
    ours, theirs = (TreeBuffers(SLOTS, num_nodes, num_nodes, on) for _ in range(2))
    expected = best(found, num_nodes, least)
    theirs.write(slots, expected)
    tree = best_trees(found, num_nodes, least, slots, ours)
    names = ("tokens", "parents", "depths", "bits")
    pairs = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    return [(a.cpu(), b.cpu()) for a, b in [*zip(tree, expected, strict=True), *pairs]]


def run(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All cases."""
    return [trees(seed, device) for seed in SEEDS]


def main() -> None:
    """Save what kernels and definition give, run by Triton's interpreter."""
    interpreter.prepare()
    torch.save(run(), sys.argv[1])


if __name__ == "__main__":
    main()
