"""Unions of several sources' candidates by the Triton kernel, and the definition's."""

import numpy as np
import torch
from candidates import grown, united

SEEDS = range(60)


def union(seed: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel and the definition give."""
    from vllm_specinfer.kernels.triton.union import Union
    from vllm_specinfer.tree.candidates import Candidates
    from vllm_specinfer.tree.on_device import DeviceCandidates

    rng = np.random.default_rng(seed)
    num_reqs, most = int(rng.integers(1, 4)), int(rng.choice([3, 7, 45]))
    pairs = [grown(rng, num_reqs, most) for _ in range(rng.integers(1, 4))]
    sources = [
        DeviceCandidates(*(torch.from_numpy(a).to(device) for a in arrays))
        for arrays, _ in pairs
    ]
    ends = [of_source for _, of_source in pairs]
    found, columns = Union(ends, torch.device(device)).of(sources)
    expected, expected_columns = united([Candidates(*arrays) for arrays, _ in pairs])
    # Tokens and parents of what is no candidate may be any.
    is_one = torch.from_numpy(np.isfinite(expected.scores))
    return [
        (columns.cpu(), torch.from_numpy(expected_columns)),
        *(
            (ours.cpu()[is_one], torch.from_numpy(theirs).long()[is_one])
            for ours, theirs in (
                (found.tokens, expected.tokens),
                (found.parents, expected.parents),
            )
        ),
        (found.scores.cpu(), torch.from_numpy(expected.scores)),
    ]


def outputs(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """All cases."""
    return [union(seed, device) for seed in SEEDS]
