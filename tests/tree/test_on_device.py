"""Trees put together on the device are those of the definitions."""

import numpy as np
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from tests.kernels.candidates import grown, united
from vllm_specinfer.tree import on_device
from vllm_specinfer.tree.candidates import Candidates, merge
from vllm_specinfer.tree.on_device import DeviceCandidates, DeviceTree, TreeBuffers
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT, node_depths


def a_source(rng, num_reqs):
    """Its candidates and its columns once the candidates of a depth are known."""
    (tokens, parents, scores), ends = grown(rng, num_reqs)
    return Candidates(tokens, parents.astype(np.int32), scores), ends


def on(candidates):
    return DeviceCandidates(
        torch.from_numpy(candidates.tokens),
        torch.from_numpy(candidates.parents).long(),
        torch.from_numpy(candidates.scores),
    )


@examples(st.integers(0, 1 << 32))
def test_the_best_candidates_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    candidates, ends = a_source(rng, int(rng.integers(1, 4)))
    num_nodes = int(rng.integers(1, 20))
    found = on_device.cut(on(candidates), num_nodes)
    assert (found.scores.numpy() == candidates.cut(num_nodes).scores).all()


@examples(st.integers(0, 1 << 32))
def test_nodes_have_the_scores_that_sources_gave_them(seed):
    rng = np.random.default_rng(seed)
    num_reqs, num_nodes = int(rng.integers(1, 4)), int(rng.integers(1, 90))
    pairs = [a_source(rng, num_reqs) for _ in range(rng.integers(1, 4))]
    sources = [candidates for candidates, _ in pairs]
    least = float(rng.choice([-np.inf, -1.0]))
    union, columns = united(sources)
    trees = union.best(num_nodes, least)
    arrays = trees.tokens, trees.parents, trees.scores, trees.places[:, :-1]
    tree = DeviceTree(*map(torch.from_numpy, arrays))
    devices = [on(source) for source, _ in pairs]
    scores = on_device.given(tree, torch.from_numpy(columns), devices).numpy()
    union, columns = merge(sources)
    expected = union.best(num_nodes, least)
    for q, (source, column) in enumerate(zip(sources, columns, strict=True)):
        own = np.full((num_reqs, num_nodes), -np.inf, np.float32)
        for r, c in zip(*np.isfinite(source.scores).nonzero(), strict=True):
            place = expected.places[r, column[r, c]]
            if place < num_nodes:
                own[r, place] = source.scores[r, c]
        assert (scores[:, q] == own).all()


@examples(st.integers(0, 1 << 32))
def test_chains_lead_from_the_root_to_a_row(seed):
    rng = np.random.default_rng(seed)
    num_nodes, slots = int(rng.integers(1, 130)), [2, 0]
    buffers = TreeBuffers(4, num_nodes, num_nodes, torch.device("cpu"))
    assert buffers.padding == 4 and (buffers.parents == NO_NODE).all()
    parents = np.array(
        [[int(rng.integers(ROOT, n)) for n in range(num_nodes)] for _ in slots],
        np.int32,
    )
    buffers.parents[slots] = torch.from_numpy(parents)
    buffers.depths[slots] = torch.from_numpy(node_depths(parents))
    rows = rng.integers(0, num_nodes + 1, 2)
    chains, before = buffers.chains(torch.tensor(slots), torch.from_numpy(rows))
    assert chains.shape == before.shape == (2, num_nodes + 1)
    for i, row in enumerate(rows.tolist()):
        path = []
        while row:
            path.insert(0, row)
            row = int(parents[i, row - 1]) + 1
        padding = (num_nodes - len(path)) * [0]
        assert chains[i].tolist() == [*padding, 0, *path]
        assert before[i].tolist() == [*padding, *range(len(path) + 1)]
