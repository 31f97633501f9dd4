"""Trees that grow by the Triton kernels, and by their definition."""

from typing import Any

import numpy as np
import torch

SEEDS = range(40)
VOCAB, BLOCK_SIZE, MAX_LEN, PAD = 11, 4, 300, -1
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


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
    positions = (context - 1 + depth).clamp(0, paged.max_model_len - 1)[:, None]
    bits = torch.where(level.is_node[:, :, None], level.bits, 0)
    return [
        paged.slots,
        context + level.used,
        torch.where(level.is_node, tokens, 0).flatten(),
        positions.expand_as(tokens).flatten(),
        torch.where(level.is_node, kv_slots, PAD).flatten(),
        context,
        bits.flatten(0, 1),
    ]


def level_of(growth: Any, depth: int, growing: np.ndarray, frontier: Any) -> Pairs:
    """The nodes of a level, and what the definition says of those of a frontier.

    Args:
        growth: Of R trees.
        depth: The level's.
        growing: [G] the requests that grow, which the frontier counts.
        frontier: None where the definition's trees are done.
    """
    level, above = (
        type(growth.levels[d])(*(part.cpu() for part in growth.levels[d]))
        for d in (depth, depth - 1)
    )
    requests, rows = level.is_node.nonzero(as_tuple=True)
    is_node = torch.zeros_like(level.is_node)
    if frontier is None:
        return [(level.is_node, is_node)]
    is_node[growing[frontier.requests], rows] = True
    columns = level.columns[requests, rows]
    # `parents` counts all rows of a level, a frontier only those of nodes.
    number = above.is_node.flatten().cumsum(0).view(above.is_node.shape) - 1
    counts = np.bincount(frontier.requests, minlength=len(growing))
    used = above.used.clone()
    used[growing] += torch.from_numpy(counts)
    defined = (
        growing[frontier.requests],
        *(frontier.nodes, frontier.tokens, frontier.parents, frontier.scratch),
        frontier.ancestor_bits,
    )
    found = (
        requests,
        *(columns, growth.tokens.cpu()[requests, columns]),
        number[requests, level.parents[requests, rows]],
        level.scratch[requests, rows],
        level.bits[requests, rows],
    )
    scores = growth.scores.cpu()[requests, columns]
    return [
        (level.is_node, is_node),
        (level.used, used),
        (level.scores[requests, rows], scores),
        *zip(found, map(torch.from_numpy, defined), strict=True),
    ]


def candidates_of(growth: Any, growing: np.ndarray, defined: Any) -> Pairs:
    """All candidates of a step."""
    expected = np.full(growth.scores.shape, -np.inf, np.float32)
    width = defined.scores.shape[1]
    expected[growing, :width] = defined.scores
    is_one = np.isfinite(defined.scores)
    found = [(growth.scores.cpu(), torch.from_numpy(expected))]
    for ours, theirs in (
        (growth.tokens, defined.tokens),
        (growth.parents, defined.parents),
    ):
        ours = ours.cpu()[growing, :width][torch.from_numpy(is_one)]
        found.append((ours, torch.from_numpy(theirs[is_one])))
    return found


def step(growth: Any, tree: Any, rng: np.random.Generator, seed: int) -> Pairs:
    """What kernels and definition leave behind after each level of one step."""
    from vllm_specinfer.drafting.graphs import GraphShape, PassRows
    from vllm_specinfer.drafting.growth import TreeGrowth
    from vllm_specinfer.kernels.triton import growth as kernels

    device, num_reqs = growth.tokens.device, len(growth.tokens)

    def some(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(low, high, shape)).to(device)

    slots = some(0, 6, num_reqs)
    lengths, lookahead = some(1, 41, 6).int(), int(some(0, 2))
    room = some(0, 200 if rng.random() < 0.5 else 12, num_reqs)
    grows = some(0, 4, num_reqs) > 0
    if seed == 0:
        room, grows = room + 200, grows | True
    context, roots = some(0, 99, 2, num_reqs)
    growth.is_node.fill_(True)
    growth.scores.zero_()
    growth.start(context, roots, slots, grows, lengths, lookahead)
    of_slots = lengths[slots].long()
    found = [
        (context.clone(), torch.where(grows, of_slots - lookahead, 0)),
        (roots.clone(), of_slots - 1),
        # Also of levels that are not run.
        (growth.is_node.clone(), torch.cat([grows, growth.is_node[num_reqs:] & False])),
        (growth.scores.clone(), torch.full_like(growth.scores, -torch.inf)),
    ]
    paged = kernels.Paged(
        table=some(0, 99, 6, 60).int(),
        block_size=BLOCK_SIZE,
        slots=slots,
        limits=context + room,
        context=context,
        roots=roots,
        max_model_len=MAX_LEN if seed == 0 or rng.random() < 0.6 else 42,
    )
    growing = grows.nonzero()[:, 0].cpu().numpy()
    deepest = paged.max_model_len - 1 - paged.roots
    limits = (values.cpu().numpy()[growing] for values in (room, deepest))
    least = np.full(len(growing), -np.inf)
    defined = TreeGrowth(tree, growth.num_nodes, *limits, least)
    # Exact products and sums: ties stay ties.
    factor, distrust = 1 + some(-2, 3, 2).cpu().numpy() / 4
    correction = torch.tensor([factor, distrust], dtype=torch.float32, device=device)
    frontier = True
    for depth, (size, k) in enumerate(
        zip(growth.sizes, growth.num_children, strict=True)
    ):
        if depth:
            words = growth.levels[depth].bits.shape[2]
            shape = GraphShape(num_reqs, size, words)
            rows = PassRows(*(
                torch.from_numpy(part).to(device) for part in PassRows.level(shape)
            ))  # fmt: skip
            kernels.expand(growth, depth, paged, rows)
            found += level_of(growth, depth, growing, frontier)
            filled = [x for n, x in rows._asdict().items() if n not in SAME]
            expected = rows_of(growth, depth, context, paged)
            found += zip(filled, expected, strict=True)
        # Ties, and children that are none.
        logprobs = -some(0, 12, num_reqs * size, k).float() / 4
        logprobs[some(0, 10, num_reqs * size, k) == 0] = -torch.inf
        logprobs[some(0, 40, num_reqs * size) == 0] = torch.nan  # an overflow
        is_node = growth.levels[depth].is_node.flatten()
        logprobs[~is_node] = float(rng.choice([0, np.nan]))
        tokens = some(0, VOCAB, num_reqs * size, k)
        kernels.extend(growth, depth, logprobs, tokens, correction)
        if frontier is not None:
            corrected = (logprobs * factor - distrust)[is_node]
            children = corrected.cpu().numpy(), tokens[is_node].cpu().numpy()
            frontier = defined.extend(*children)
    found += candidates_of(growth, growing, defined._found)
    return [(ours.cpu().clone(), theirs.cpu().clone()) for ours, theirs in found]


# What a level of as many rows of each request has already.
SAME = ("starts", "is_tree")


def grown(seed: int, device: str = "cpu") -> Pairs:
    """Two steps: what one leaves does not matter to the next."""
    from vllm_specinfer.drafting.device_growth import DeviceGrowth
    from vllm_specinfer.options import BestFirstTree

    rng = np.random.default_rng(seed)
    num_reqs, num_nodes = int(rng.integers(1, 5)), int(rng.integers(1, 100))
    if seed % 2:
        num_nodes = 1 + num_nodes % 11
    tree = a_tree(rng)
    if seed == 0:  # bits of two words
        num_reqs, num_nodes, tree = 2, 1000, BestFirstTree(6, 16, 0)
    growth = DeviceGrowth(tree, num_nodes, num_reqs, torch.device(device))
    first = step(growth, tree, rng, seed)
    return first + step(growth, tree, rng, seed)


def outputs(device: str = "cpu") -> list[Pairs]:
    """What kernels and definition leave behind in every case."""
    return [grown(seed, device) for seed in SEEDS]
