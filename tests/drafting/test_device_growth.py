"""Trees that grow in fixed shapes are those of the definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.drafting.growth import TreeGrowth
from vllm_specinfer.options import BestFirstTree, ExpansionTree

VOCAB = 11
CPU = torch.device("cpu")


def limits(rng, num_reqs):
    """Scratch slots and deepest nodes, often few."""
    most = 200 if rng.random() < 0.5 else 12
    return rng.integers(0, most, num_reqs), rng.integers(0, 7, num_reqs)


def a_tree(rng):
    if rng.random() < 0.3:
        return ExpansionTree(tuple(rng.integers(1, 4, rng.integers(1, 5)).tolist()))
    return BestFirstTree(int(rng.integers(1, 6)), int(rng.integers(1, 9)), 0)


def children(rng, rows, k):
    """Ties, and children that are none."""
    logprobs = -rng.integers(0, 12, (rows, k)).astype(np.float32) / 4
    logprobs[rng.random((rows, k)) < 0.1] = -np.inf
    return logprobs, rng.integers(0, VOCAB, (rows, k))


@given(st.integers(0, 1 << 32))
def test_levels_and_trees_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    num_reqs, num_nodes = int(rng.integers(1, 5)), int(rng.integers(1, 100))
    tree = a_tree(rng)
    growth = DeviceGrowth(tree, num_nodes, num_reqs, CPU)
    # What a step leaves does not matter to the next one.
    for growing in (num_reqs, int(rng.integers(1, num_reqs + 1))):
        check_step(rng, growth, tree, num_nodes, growing)


def check_step(rng, growth, tree, num_nodes, growing):
    num_reqs = len(growth.tokens)
    growth.start(torch.arange(num_reqs) < growing)
    limited = limits(rng, num_reqs)
    least = np.full(growing, -np.inf)
    defined = TreeGrowth(tree, num_nodes, *(v[:growing] for v in limited), least)
    limited = [torch.from_numpy(values) for values in limited]
    is_node = growth.levels[0].is_node.numpy()
    frontier = True
    for depth, k in enumerate(growth.num_children):
        logprobs, tokens = children(rng, is_node.size, k)
        rows = is_node.ravel()
        logprobs[~rows] = rng.choice([0, np.nan])
        growth.extend(depth, torch.tensor(logprobs), torch.tensor(tokens))
        if frontier is not None:
            assert defined.num_children == k
            frontier = defined.extend(logprobs[rows], tokens[rows])
        if depth + 1 < len(growth.num_children):
            is_node = growth.advance(depth + 1, *limited).is_node.numpy()
            check_level(growth, depth + 1, frontier)
    expected, scores = defined.finish(), growth.scores.numpy()
    width = expected.scores.shape[1]
    assert np.isneginf(scores[:, width:]).all()
    assert np.isneginf(scores[growing:]).all()
    real = np.isfinite(expected.scores)
    for found, same in (
        (scores, expected.scores),
        (growth.tokens.numpy(), expected.tokens),
        (growth.parents.numpy(), expected.parents),
    ):
        assert (found[:growing, :width][real] == same[real]).all()


def check_level(growth, depth, frontier):
    level = growth.levels[depth]
    requests, rows = np.nonzero(level.is_node.numpy())
    if frontier is None:
        assert not len(requests)
        return
    columns = level.columns.numpy()[requests, rows]
    scratch = level.scratch.numpy()[requests, rows]
    assert requests.tolist() == frontier.requests.tolist()
    assert columns.tolist() == frontier.nodes.tolist()
    assert scratch.tolist() == frontier.scratch.tolist()
    tokens = growth.tokens.numpy()[requests, columns]
    assert tokens.tolist() == frontier.tokens.tolist()
    assert (level.bits.numpy()[requests, rows] == frontier.ancestor_bits).all()
    assert (scratch < level.used.numpy()[requests]).all()
    # `parents` counts all rows of a level, a frontier only those of nodes.
    above = growth.levels[depth - 1].is_node.numpy()
    flat = requests * above.shape[1] + level.parents.numpy()[requests, rows]
    assert (np.cumsum(above.ravel()) - 1)[flat].tolist() == frontier.parents.tolist()
