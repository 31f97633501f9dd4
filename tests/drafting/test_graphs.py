"""Which passes a captured graph runs, and what it is filled with."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_specinfer.device import StagedBuffers
from vllm_specinfer.drafting.graphs import (
    Captured,
    GraphShape,
    Outputs,
    PassGraph,
    PassGraphs,
    PassRows,
    StaticPass,
    most_requests,
)

CPU = torch.device("cpu")


def rows_of(counts: list[int]) -> PassRows:
    num_rows = sum(counts)
    return PassRows.chains(
        slots=np.arange(len(counts)) + 5,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens=np.array(counts, np.int32) + 10,
        tokens=np.arange(num_rows, dtype=np.int32) + 100,
        positions=np.arange(num_rows) + 20,
        kv_slots=np.arange(num_rows) + 30,
    )


def graph(shape: GraphShape) -> PassGraph:
    """Gives each row's token and state, doubled."""
    inputs = StagedBuffers(CPU, *PassRows.padding(shape))
    tensors, states = PassRows(*inputs.tensors), torch.zeros(shape.num_rows, 2)
    outputs = torch.zeros(shape.num_rows, dtype=torch.int32), torch.zeros_like(states)

    def launch() -> Outputs:
        outputs[0].copy_(2 * tensors.tokens)
        outputs[1].copy_(2 * states)
        return outputs

    graph = SimpleNamespace(replay=launch)
    fixed = StaticPass(inputs, tensors, states, launch)
    return PassGraph(shape, fixed, Captured(outputs, graph, launch))


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [2, 1]), (6, [6, 4, 2, 1]), (8, [8, 4, 2, 1])]
)
def test_graphs_take_powers_of_two_requests_and_the_most(most, sizes):
    shapes: list[GraphShape] = []
    PassGraphs(GraphShape(most, 3, 1), lambda shape: shapes.append(shape))
    assert shapes == [GraphShape(size, 3, 1) for size in sizes]


@pytest.mark.parametrize(
    ("max_num_reqs", "most_nodes", "most_rows", "num_reqs"),
    [
        *[(1024, 4, 5, 256), (128, 4, 5, 128), (1024, 1, 5, 1024), (8, 2000, 2000, 1)],
        # No pass has more rows than the model was compiled for.
        *[(1024, 1, 9, 910), (1024, 4, 65, 126)],
    ],
)
def test_the_largest_graphs_are_bounded(max_num_reqs, most_nodes, most_rows, num_reqs):
    scheduler = SimpleNamespace(max_num_seqs=max_num_reqs, max_num_batched_tokens=8192)
    assert most_requests(scheduler, most_nodes, most_rows) == num_reqs


def rows_by_request(rows: PassRows) -> list[tuple[int, ...]]:
    """Slot, token, K/V slot and position of each row."""
    slots = np.repeat(rows.slots, np.diff(rows.starts))
    columns = slots, rows.tokens, rows.kv_slots, rows.positions
    return list(zip(*(column.tolist() for column in columns), strict=True))


@pytest.mark.parametrize("most", [1, 2, 4, 7, 17])
def test_a_pass_of_too_many_rows_is_several(most):
    """Piece by piece, a chain's rows see the K/V of those before them and no more."""
    rows = rows_of([3, 0, 9, 1, 5])
    rows.is_tree[4] = True
    pieces = rows.pieces(most)
    assert len(pieces) == -(-18 // most)
    assert sum(map(rows_by_request, pieces), []) == rows_by_request(rows)
    # K/V before a chain's first row; a tree's is all there.
    lengths = {5: 10, 7: 10, 8: 10, 9: 15}
    for piece in pieces:
        assert piece.starts[0] == 0 and piece.starts[-1] == len(piece.tokens) <= most
        counts = np.diff(piece.starts)
        for slot, count, end in zip(piece.slots, counts, piece.seq_lens, strict=True):
            if count:
                lengths[slot] += 0 if slot == 9 else count
                assert end == lengths[slot]
    assert lengths == {5: 13, 7: 19, 8: 11, 9: 15}
    assert rows.pieces(18) == [rows]


def test_the_smallest_graph_that_takes_a_pass_runs_it():
    graphs = PassGraphs(GraphShape(6, 3, 1), graph)

    def size(counts: list[int]) -> int:
        return graphs.of(rows_of(counts)).shape.num_reqs

    assert [size([1]), size([3, 1]), size([1, 2, 3]), size([1] * 5)] == [1, 2, 4, 6]
    assert graphs.of(rows_of([1] * 7)) is None
    # Rows that a smaller request leaves free are no room for those of another.
    assert graphs.of(rows_of([4, 1])) is None
    wide = rows_of([1])._replace(ancestor_bits=np.zeros((1, 2), np.int64))
    assert graphs.of(wide) is None


def test_rows_come_first_and_padding_has_no_effect():
    rows = rows_of([2, 1])
    padded = rows.padded(GraphShape(4, 3, 2))
    assert padded.starts.tolist() == [0, 2, 3, 3, 3]
    assert padded.kv_slots.tolist() == [30, 31, 32] + [PAD_SLOT_ID] * 9
    assert padded.slots.tolist() == [5, 6, 0, 0]
    assert padded.ancestor_bits.shape == (12, 2)
    for whole, part in zip(padded, rows, strict=True):
        assert whole.dtype == part.dtype


def test_a_pass_gives_its_own_rows_whatever_ran_before():
    found = graph(GraphShape(2, 3, 1))
    found.run(rows_of([3, 3]), torch.ones(6, 2))
    tokens, states = found.run(rows_of([2]), torch.full((2, 2), 3.0))
    assert tokens.tolist() == [200, 202]
    assert states.tolist() == [[6, 6], [6, 6]]
    filled = PassRows(*found.fixed.inputs.tensors)
    assert filled.starts.tolist() == [0, 2, 2]
    assert filled.kv_slots.tolist()[2:] == [PAD_SLOT_ID] * 4
