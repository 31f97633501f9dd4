"""Draws that the device keeps are those that the host's trees bring along."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.drafting.children import _drawn
from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.options import ExpansionTree
from vllm_specinfer.tree.device_draws import DrawBuffers, RowDraws, rows_of
from vllm_specinfer.tree.on_device import DeviceTree
from vllm_specinfer.tree.proposals import NO_DRAW, Draws, joined

SLOTS, NODES, VOCAB = 3, 5, 9


def a_level(rng, num_rows, k, m, replaces):
    """Draws of some rows, and what `joined` takes of each."""
    tokens = np.array([rng.permutation(VOCAB)[:m] for _ in range(num_rows)])
    q = rng.dirichlet(np.full(m, 0.5), num_rows)
    q[rng.random(q.shape) < 0.3] = 0
    q[rng.random(num_rows) < 0.2] = 0  # greedy
    total = q.sum(axis=1, keepdims=True)
    q /= np.where(total > 0, total, 1)
    _, places, drawn_from = _drawn(q, rng.random((num_rows, k)), replaces)
    device = RowDraws(*map(torch.from_numpy, (places, tokens, q)))
    whole = Draws(places, tokens, drawn_from)
    return device, [whole.row(f) for f in range(num_rows)]


@given(st.integers(0, 1 << 32))
def test_draws_below_rows_are_those_of_all_sources(seed):
    rng = np.random.default_rng(seed)
    replaces, num_sources = bool(rng.integers(2)), int(rng.integers(1, 4))
    shapes = [rng.integers(1, 5, 2).tolist() for _ in range(num_sources)]
    slots = torch.from_numpy(rng.permutation(SLOTS)[:2])
    grown = [[a_level(rng, 2, k, m, replaces)[0]] for k, m in shapes]
    buffers = DrawBuffers(SLOTS + 1, NODES, grown, replaces)
    expected = {}
    for _ in range(2):  # the first trees are forgotten
        buffers.clear(slots)
        expected.clear()
        for q, (k, m) in enumerate(shapes):
            rows = np.array([rng.permutation(NODES + 2)[:3] for _ in slots])
            draws, of_rows = a_level(rng, rows.size, k, m, replaces)
            buffers.write(slots, torch.from_numpy(rows), q, draws)
            places = [(s, r) for s, of_slot in zip(slots.tolist(), rows, strict=True)
                      for r in of_slot.tolist()]  # fmt: skip
            for place, draw in zip(places, of_rows, strict=True):
                expected.setdefault(place, []).append(draw)
    asked = [(s, r) for s in slots.tolist() for r in range(NODES + 1)]
    found = buffers.of(*torch.tensor(asked).T)
    for g, place in enumerate(asked):
        draws = [d for d in expected.get(place, []) if (d.places != NO_DRAW).any()]
        places, tokens, q = (part[g].numpy() for part in found)
        num_draws = int((places != NO_DRAW).sum())
        assert (places[num_draws:] == NO_DRAW).all()
        known = tokens[tokens >= 0]
        assert len(set(known.tolist())) == len(known)
        if not draws:
            assert num_draws == len(known) == 0
            continue
        of_place = joined(draws)
        mine = of_place.places[0][of_place.places[0] != NO_DRAW]
        assert tokens[places[:num_draws]].tolist() == of_place.tokens[0, mine].tolist()
        dense, own = np.zeros((2, num_draws, VOCAB))
        dense[:, known] = q[:num_draws, tokens >= 0]
        own[:, of_place.tokens[0]] = of_place.q[0, :num_draws]
        assert dense == pytest.approx(own)


def test_rows_are_those_that_nodes_have_become():
    growth = DeviceGrowth(ExpansionTree((2, 1)), 3, 1, torch.device("cpu"))
    growth.is_node[0] = True
    level = growth.levels[1]
    level.columns.copy_(torch.tensor([[0, 1]]))
    level.is_node.copy_(torch.tensor([[True, True]]))
    none = torch.zeros(1, 0)
    # Of six candidates of the union two are nodes; the source's begin at 2.
    places = torch.tensor([[1, 3, 3, 0, 3, 3]])
    tree = DeviceTree(torch.zeros(1, 3, dtype=torch.int32), none, places)
    columns = torch.arange(6)[None]
    assert rows_of(growth.levels[0], columns, 2, tree).tolist() == [[0]]
    assert rows_of(level, columns, 2, tree).tolist() == [[4, 1]]
    columns = torch.tensor([[0, 1, 0, 3, 4, 5]])  # it has the first one's path
    assert rows_of(level, columns, 2, tree).tolist() == [[2, 1]]
    growth.is_node.zero_()  # the second level has not been reached
    for of_depth in growth.levels:
        assert (rows_of(of_depth, columns, 2, tree) == 4).all()
