"""Trees that grow by the Triton kernels, and by the definition in torch.

``TRITON_INTERPRET=1 python growth_cases.py OUTPUT.pt`` saves both.
"""

import sys
from typing import Any

import interpreter
import numpy as np
import torch

SEEDS = range(40)
VOCAB, BLOCK_SIZE, MAX_LEN, PAD = 11, 4, 300, -1


def a_tree(rng: np.random.Generator) -> Any:
    """Of any shape."""
    from vllm_specinfer.options import BestFirstTree, ExpansionTree

    if rng.random() < 0.3:
        return ExpansionTree(tuple(rng.integers(1, 4, rng.integers(1, 5)).tolist()))
    return BestFirstTree(int(rng.integers(1, 6)), int(rng.integers(1, 9)), 0)


def rows_of(growth: Any, depth: int, context: torch.Tensor, paged: Any) -> list:
    """What a pass over a level is filled with, by the definition."""
    level = growth.levels[depth]
    flat = context[:, None] + level.scratch.clamp_min(0)
    columns = (flat // BLOCK_SIZE).clamp_max(paged.table.shape[1] - 1)
    blocks = paged.table[paged.slots[:, None], columns].long()
    kv_slots = blocks * BLOCK_SIZE + flat % BLOCK_SIZE
    tokens = growth.tokens.gather(1, level.columns)
    positions = (context - 1 + depth).clamp(0, MAX_LEN - 1)[:, None]
    return [
        paged.slots,
        context + level.used,
        torch.where(level.is_node, tokens, 0).flatten(),
        positions.expand_as(tokens).flatten(),
        torch.where(level.is_node, kv_slots, PAD).flatten(),
        context,
        level.bits.flatten(0, 1),
    ]


def grown(seed: int, device: str = "cpu") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What kernels and definition leave behind after each level of one step."""
    from vllm_specinfer.drafting.device_growth import DeviceGrowth
    from vllm_specinfer.drafting.graphs import GraphShape, PassRows
    from vllm_specinfer.kernels.triton import growth as kernels
    from vllm_specinfer.options import BestFirstTree

    rng = np.random.default_rng(seed)

    def some(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape)).to(device)

    num_reqs, num_nodes = int(rng.integers(1, 5)), int(rng.integers(1, 12))
    tree = a_tree(rng)
    if seed == 0:  # bits of two words
        num_reqs, num_nodes, tree = 2, 1000, BestFirstTree(6, 16, 0)
    on = torch.device(device)
    ours, theirs = (DeviceGrowth(tree, num_nodes, num_reqs, on) for _ in range(2))
    context = some(0, 40, num_reqs)
    room = some(0, 200 if rng.random() < 0.5 else 12, num_reqs)
    grows = some(0, 4, num_reqs) > 0
    if seed == 0:
        room, grows = room + 200, grows | True
    paged = kernels.Paged(
        table=some(0, 99, 6, 60).int(),
        block_size=BLOCK_SIZE,
        slots=some(0, 6, num_reqs),
        limits=context + room,
        context=context,
        roots=context + some(0, 2, num_reqs),
        max_model_len=MAX_LEN if seed == 0 or rng.random() < 0.6 else 42,
    )
    deepest = paged.max_model_len - 1 - paged.roots
    ours.start(grows)
    theirs.start(grows)
    factor, distrust = rng.random() + 0.5, rng.random()
    correction = torch.tensor([factor, distrust], dtype=torch.float32, device=on)
    found = []
    for depth, (size, k) in enumerate(zip(ours.sizes, ours.num_children, strict=True)):
        if depth:
            shape = GraphShape(num_reqs, size, theirs.levels[depth].bits.shape[2])
            rows = PassRows(*(
                torch.from_numpy(part).to(device) for part in PassRows.level(shape)
            ))  # fmt: skip
            kernels.expand(ours, depth, paged, rows)
            theirs.advance(depth, paged.limits - context, deepest)
            found += zip(ours.levels[depth], theirs.levels[depth], strict=True)
            expected = rows_of(theirs, depth, context, paged)
            if paged.max_model_len != MAX_LEN:
                expected[3] = expected[3].clamp_max(paged.max_model_len - 1)
            filled = [x for n, x in rows._asdict().items() if n not in SAME]
            found += zip(filled, expected, strict=True)
        # Ties, and children that are none.
        logprobs = -some(0, 12, num_reqs * size, k).float() / 4
        logprobs[some(0, 10, num_reqs * size, k) == 0] = -torch.inf
        logprobs[~ours.levels[depth].is_node.flatten()] = torch.nan
        tokens = some(0, VOCAB, num_reqs * size, k)
        kernels.extend(ours, depth, logprobs, tokens, correction)
        theirs.extend(depth, logprobs * correction[0] - correction[1], tokens)
        for name in ("tokens", "parents", "scores"):
            found.append((getattr(ours, name).clone(), getattr(theirs, name).clone()))
    return found


# What a level of as many rows of each request has already.
SAME = ("starts", "is_tree")


def run(device: str = "cpu") -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What kernels and definition leave behind in every step."""
    found = [grown(seed, device) for seed in SEEDS]
    return [[(a.cpu().clone(), b.cpu().clone()) for a, b in one] for one in found]


def main() -> None:
    """Save what kernels and definition give, run by Triton's interpreter."""
    interpreter.prepare()
    torch.save(run(), sys.argv[1])


if __name__ == "__main__":
    main()
