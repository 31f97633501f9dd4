"""Trees of the best candidates by the Triton kernels, and by the definitions."""

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
    from vllm_specinfer.tree.candidates import NO_TOKEN, Candidates
    from vllm_specinfer.tree.on_device import DeviceCandidates, TreeBuffers
    from vllm_specinfer.tree.token_tree import NO_NODE, ancestor_bits, node_depths

    rng = np.random.default_rng(seed)
    num_reqs, width = int(rng.integers(1, 4)), int(rng.integers(1, 150))
    num_nodes = int(rng.choice([1, 3, 8, 20, 130]))
    least = float(rng.choice([-np.inf, -1.0]))
    on = torch.device(device)
    arrays = candidates(rng, num_reqs, width)
    found = DeviceCandidates(*(torch.from_numpy(a).to(on) for a in arrays))
    slots = torch.from_numpy(rng.permutation(SLOTS)[:num_reqs])
    ours, theirs = (TreeBuffers(SLOTS, num_nodes, num_nodes, on) for _ in range(2))
    tree = best_trees(found, num_nodes, least, slots.to(on), ours)
    expected = Candidates(*arrays).best(num_nodes, least)
    is_node = expected.tokens != NO_TOKEN
    tokens = torch.from_numpy(np.where(is_node, expected.tokens, 0))
    parents = np.where(is_node, expected.parents, NO_NODE)
    parents = torch.from_numpy(parents.astype(np.int32))
    # What is no node sees the root and itself, as a child of the root does.
    rows = node_depths(expected.parents), ancestor_bits(expected.parents)
    kept = [tokens, parents, *map(torch.tensor, rows)]
    names = ("tokens", "parents", "depths", "bits")
    buffers = [(getattr(ours, name), getattr(theirs, name)) for name in names]
    for (_, buffer), values in zip(buffers, kept, strict=True):
        buffer[slots] = values.to(on)
    scores, places = map(torch.from_numpy, (expected.scores, expected.places[:, :-1]))
    pairs = [*zip(tree, (parents, scores, places), strict=True), *buffers]
    return [(a.cpu(), b.cpu()) for a, b in pairs]


def outputs(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All cases."""
    return [trees(seed, device) for seed in SEEDS]
