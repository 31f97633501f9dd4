"""Trees put together on the device are those of the definitions."""

import numpy as np
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from tests.kernels.candidates import grown
from vllm_specinfer.tree import on_device
from vllm_specinfer.tree.candidates import Candidates
from vllm_specinfer.tree.on_device import DeviceCandidates, TreeBuffers
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
