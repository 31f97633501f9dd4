"""Unions of several sources' candidates by the Triton kernel, and the definition's."""

import numpy as np
import torch
from candidates import grown, united

SEEDS = range(60)


def union(seed: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel and the definition give."""
    from vllm_specinfer.kernels.triton.union import Union
    from vllm_specinfer.tree.candidates import Candidates
    from vllm_specinfer.tree.on_device import DeviceCandidates, DeviceTree

    rng = np.random.default_rng(seed)
    num_reqs, most = int(rng.integers(1, 4)), int(rng.choice([3, 7, 45]))
    pairs = [grown(rng, num_reqs, most) for _ in range(rng.integers(1, 4))]
    sources = [
        DeviceCandidates(*(torch.from_numpy(a).to(device) for a in arrays))
        for arrays, _ in pairs
    ]
    ends = [of_source for _, of_source in pairs]
    num_nodes, least = int(rng.integers(1, 90)), float(rng.choice([-np.inf, -1.0]))
    merger = Union(ends, torch.device(device))
    found, columns, scores = merger.of(sources)
    of_sources = [Candidates(*arrays) for arrays, _ in pairs]
    expected, expected_columns = united(of_sources)
    trees = expected.best(num_nodes, least)
    arrays = trees.parents, trees.scores, trees.places[:, :-1]
    tree = DeviceTree(*(torch.from_numpy(a).contiguous().to(device) for a in arrays))
    given = merger.given(tree, columns, scores)
    # Tokens and parents of what is no candidate may be any.
    is_one = torch.from_numpy(np.isfinite(expected.scores))
    return [
        (columns.cpu(), torch.from_numpy(expected_columns)),
        (given.cpu(), given_to(of_sources, num_nodes, least, trees.scores)),
        *(
            (ours.cpu()[is_one], torch.from_numpy(theirs).long()[is_one])
            for ours, theirs in (
                (found.tokens, expected.tokens),
                (found.parents, expected.parents),
            )
        ),
        (found.scores.cpu(), torch.from_numpy(expected.scores)),
    ]


def given_to(
    sources: list, num_nodes: int, least: float, scores: np.ndarray
) -> torch.Tensor:
    """[R, Q, N] what each source gave the nodes of the best trees."""
    from vllm_specinfer.tree.candidates import merge

    if len(sources) == 1:
        return torch.from_numpy(scores[:, None])
    union, columns = merge(sources)
    places = union.best(num_nodes, least).places
    given = np.full((len(scores), len(sources), num_nodes), -np.inf, np.float32)
    for q, (source, column) in enumerate(zip(sources, columns, strict=True)):
        for r, c in zip(*np.isfinite(source.scores).nonzero(), strict=True):
            place = places[r, column[r, c]]
            if place < num_nodes:
                given[r, q, place] = source.scores[r, c]
    return torch.from_numpy(given)


def outputs(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All cases."""
    return [union(seed, device) for seed in SEEDS]
