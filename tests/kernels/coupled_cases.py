"""Random rows of SSMs, and the children that the Triton kernel chooses for them."""

import numpy as np
import torch
from verification_cases import tensors

SEEDS = range(16)
VOCAB = 300


def case(seed: int) -> dict:
    """Rows of some requests; every third one is greedy, others cut their tails off."""
    rng = np.random.default_rng(seed)
    num_reqs, rows_per_req = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    num_rows = num_reqs * rows_per_req
    m = int(rng.choice([3, 16, 33, 128]))
    logits = rng.normal(0, 3, (num_rows, VOCAB))
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tokens = np.argsort(-logprobs, axis=1)[:, :m]
    temperatures = rng.choice([0.3, 1, 1.7], num_reqs)
    temperatures[seed % 3 :: 3] = 0
    return {
        "logprobs": np.take_along_axis(logprobs, tokens, axis=1).astype(np.float32),
        "tokens": tokens,
        "seeds": rng.integers(-(2**63), 2**63, num_reqs),
        "positions": rng.integers(0, 5000, num_reqs),
        "temperatures": temperatures.astype(np.float32),
        "top_k": rng.choice([2, 20, VOCAB], num_reqs),
        "top_p": rng.choice([0.5, 0.9, 1], num_reqs).astype(np.float32),
        "min_p": rng.choice([0, 0, 0.1], num_reqs).astype(np.float32),
        "depth": int(rng.integers(0, 5)),
        "k": int(rng.integers(1, 6)),
    }


def outputs(device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Scores and children of every seed."""
    from vllm_specinfer.kernels.triton.coupled import coupled_children

    found = []
    for seed in SEEDS:
        chosen = coupled_children(**tensors(case(seed), device))
        found.append(tuple(t.cpu() for t in chosen))
    return found
