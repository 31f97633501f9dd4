"""Random rows of SSMs, and the children that the Triton kernel draws for them."""

import coupled_cases
import numpy as np
import torch
from verification_cases import tensors

SEEDS = coupled_cases.SEEDS


def case(seed: int) -> dict:
    """As `coupled_cases.case`, of nodes that are candidates; every other one rrs."""
    found = coupled_cases.case(seed)
    del found["depth"]
    rng = np.random.default_rng(seed)
    num_reqs, num_rows = len(found["seeds"]), len(found["tokens"])
    shape = num_reqs, num_rows // num_reqs
    found["roots"] = found.pop("positions")
    found["columns"] = rng.permutation(num_rows).reshape(shape) - 1
    found["replaces"] = bool(seed % 2)
    return found


def outputs(device: str = "cpu") -> list[tuple[torch.Tensor, ...]]:
    """Scores, children, places and distributions of every seed."""
    from vllm_specinfer.kernels.triton.drawn import drawn_children

    found = []
    for seed in SEEDS:
        scores, children, draws = drawn_children(**tensors(case(seed), device))
        found.append(tuple(t.cpu() for t in (scores, children, draws.places, draws.q)))
    return found
