"""Trees put together on the device are those of the definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given as examples
from hypothesis import strategies as st

from tests.kernels.candidates import VOCAB, grown
from vllm_specinfer.tree import on_device
from vllm_specinfer.tree.candidates import NO_TOKEN, Candidates, merge
from vllm_specinfer.tree.on_device import DeviceCandidates, TreeBuffers
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT, ancestor_bits, node_depths


def a_source(rng, num_reqs):
    """Its candidates and `ends`."""
    (tokens, parents, scores), ends = grown(rng, num_reqs)
    return Candidates(tokens, parents.astype(np.int32), scores), ends


def on(candidates, ends):
    return DeviceCandidates(
        torch.from_numpy(candidates.tokens),
        torch.from_numpy(candidates.parents).long(),
        torch.from_numpy(candidates.scores),
        ends,
    )


@examples(st.integers(0, 1 << 32))
def test_unions_and_trees_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    num_reqs, num_nodes = int(rng.integers(1, 4)), int(rng.integers(1, 90))
    pairs = [a_source(rng, num_reqs) for _ in range(rng.integers(1, 4))]
    sources = [candidates for candidates, _ in pairs]
    least = float(rng.choice([-np.inf, -1.0]))
    limits = rng.integers(1, 20, len(sources)).tolist()
    devices = [
        on_device.cut(on(*pair), n) for pair, n in zip(pairs, limits, strict=True)
    ]
    sources = [source.cut(n) for source, n in zip(sources, limits, strict=True)]
    union, columns = merge(sources)
    expected = union.best(num_nodes, least)
    device_union, device_columns = on_device.merged(devices)
    tree = on_device.best(device_union, num_nodes, least)
    is_node = expected.tokens != NO_TOKEN
    assert ((tree.parents != NO_NODE).numpy() == is_node).all()
    assert (tree.tokens.numpy()[is_node] == expected.tokens[is_node]).all()
    assert (tree.tokens.numpy() >= 0).all()
    assert (tree.parents.numpy()[is_node] == expected.parents[is_node]).all()
    assert tree.scores.numpy()[is_node] == pytest.approx(expected.scores[is_node])
    scores = on_device.given(tree, device_columns, devices).numpy()
    for q, (source, column) in enumerate(zip(sources, columns, strict=True)):
        own = np.full((num_reqs, num_nodes), -np.inf, np.float32)
        for r, c in zip(*np.isfinite(source.scores).nonzero(), strict=True):
            place = expected.places[r, column[r, c]]
            if place < num_nodes:
                own[r, place] = source.scores[r, c]
        assert (scores[:, q] == own).all()


@examples(st.integers(0, 1 << 32))
def test_buffers_hold_the_rows_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    num_nodes, slots = int(rng.integers(1, 130)), [2, 0, 4, 4]
    buffers = TreeBuffers(4, num_nodes, num_nodes, torch.device("cpu"))
    assert buffers.padding == 4
    parents = np.array(
        [[int(rng.integers(ROOT, n)) for n in range(num_nodes)] for _ in slots],
        np.int32,
    )
    tokens = torch.from_numpy(rng.integers(0, VOCAB, parents.shape))
    depths = node_depths(parents)
    none = torch.zeros(0)
    tree = on_device.DeviceTree(tokens, torch.from_numpy(parents), none, none)
    buffers.write(torch.tensor(slots), tree)
    bits = ancestor_bits(parents)
    for i, slot in enumerate(slots[:2]):
        assert (buffers.tokens[slot] == tokens[i]).all()
        assert (buffers.parents[slot].numpy() == parents[i]).all()
        assert (buffers.depths[slot].numpy() == depths[i]).all()
        assert (buffers.bits[slot].numpy() == bits[i]).all()
    rows = rng.integers(0, num_nodes + 1, 2)
    chains, before = buffers.chains(torch.tensor(slots[:2]), torch.from_numpy(rows))
    assert chains.shape == before.shape == (2, num_nodes + 1)
    for i, row in enumerate(rows.tolist()):
        path = []
        while row:
            path.insert(0, row)
            row = int(parents[i, row - 1]) + 1
        padding = (num_nodes - len(path)) * [0]
        assert chains[i].tolist() == [*padding, 0, *path]
        assert before[i].tolist() == [*padding, *range(len(path) + 1)]
    assert (buffers.parents[1] == NO_NODE).all()


def test_what_is_no_node_sees_the_root_and_itself():
    parents = torch.tensor([[ROOT, 0, NO_NODE]], dtype=torch.int32)
    depths, bits = on_device.depths_and_bits(parents, 4)
    assert depths.tolist() == [[0, 1, 2, 1]]
    assert bits[0, :, 0].tolist() == [0b1, 0b11, 0b111, 0b1001]
