"""Random inputs of the device verification, and what the Triton kernels make of it."""

import numpy as np
import torch

SEEDS = range(12)
TEST_SALT = 1 << 31


def draw_case(seed: int) -> dict:
    """Draws of some rows of a batch; every third row has candidates to spare."""
    rng = np.random.default_rng(seed)
    num_rows, vocab = 9, 300
    m, k = int(rng.choice([5, 16, 33])), int(rng.integers(1, 5))
    rows = rng.permutation(num_rows)[:6]
    logits = rng.normal(0, 2, (num_rows, vocab)).astype(np.float32)
    logits[:, rng.integers(0, vocab, 20)] = -np.inf
    tokens = np.array([rng.permutation(vocab)[:m] for _ in rows])
    tokens[::3, m // 2 :] = -1
    q = rng.dirichlet(np.full(m, 0.3), (len(rows), k))
    q[tokens[:, None].repeat(k, 1) < 0] = 0
    q /= q.sum(axis=2, keepdims=True)
    places = np.array([[rng.choice(m, p=of_draw) for of_draw in row] for row in q])
    places[::2, k - 1 :] = -1
    # Rows that agree with the SSM here and there, so that both outcomes occur.
    for g in range(0, len(rows), 2):
        known = q[g, 0] > 0
        logits[rows[g], tokens[g][known]] = np.log(q[g, 0][known]) + 9
    return {
        "logits": logits,
        "rows": rows,
        "tokens": tokens,
        "q": q,
        "places": places,
        "seeds": rng.integers(-(2**63), 2**63, len(rows)),
        "positions": rng.integers(0, 5000, len(rows)),
    }


def tree_case(seed: int) -> dict:
    """Trees of all sizes over a small vocabulary, so that walks go deep.

    Of each slot there is one, of which a step has some, in any order.
    """
    rng = np.random.default_rng(seed)
    num_nodes = int(rng.choice([1, 7, 40, 128]))
    num_rows = np.concatenate([[0], rng.integers(1, num_nodes + 2, 6), [num_nodes + 1]])
    first = np.concatenate([[0], np.cumsum(np.maximum(num_rows, 1))[:-1]])
    num_slots = len(num_rows) + 3
    parents = np.array(
        [[rng.integers(-1, i) for i in range(num_nodes)] for _ in range(num_slots)],
        np.int32,
    )
    return {
        "targets": rng.integers(0, 2, int(np.maximum(num_rows, 1).sum())),
        "first": first,
        "num_rows": num_rows.astype(np.int32),
        "slots": rng.permutation(num_slots)[: len(num_rows)],
        "tokens": rng.integers(0, 2, parents.shape),
        "parents": parents,
    }


def tensors(case: dict, device: str) -> dict:
    """The arrays of a case as tensors."""
    arrays = {k: v for k, v in case.items() if isinstance(v, np.ndarray)}
    on_device = {k: torch.tensor(v, device=device) for k, v in arrays.items()}
    return {**case, **on_device}


def outputs(device: str = "cpu") -> tuple[list, list]:
    """What the kernels give for every seed: draws, walks."""
    from vllm_specinfer.kernels.triton import verification
    from vllm_specinfer.tree.table import WalkedTrees

    draws, walks = [], []
    for seed in SEEDS:
        case = tensors(draw_case(seed), device)
        case["positions"] += TEST_SALT
        found = verification.verify_draws(**case)
        draws.append((found.cpu(), case["logits"].cpu()))
        trees = tensors(tree_case(seed), device)
        targets = trees.pop("targets")
        walked = verification.walk_trees(targets, WalkedTrees(**trees))
        walks.append([values.cpu() for values in walked])
    return draws, walks
