"""A step's plan of trees on the device is that of the same trees on the host."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.device_plan import DevicePlan
from vllm_specinfer.tree.on_device import TreeBuffers
from vllm_specinfer.tree.table import TreeTable
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT, ancestor_bits, node_depths

SLOTS, NODES = 6, 70
CPU = torch.device("cpu")


@given(st.integers(0, 1 << 32))
def test_rows_positions_drafts_and_parents_are_the_hosts(seed):
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, SLOTS + 1))
    slots = rng.permutation(SLOTS)[:num_reqs]
    # Others than the step's have trees, too.
    shape = SLOTS, NODES
    sizes = rng.integers(0, NODES + 1, SLOTS)
    exists = np.arange(NODES) < sizes[:, None]
    parents = rng.integers(ROOT, np.arange(NODES), shape, np.int32)
    tokens = rng.integers(0, 1000, shape)
    computed = rng.integers(0, 1000, SLOTS)
    table, buffers = TreeTable(SLOTS, NODES), TreeBuffers(SLOTS, NODES, NODES, CPU)
    for smaller in (np.ones(shape, bool), exists):
        table.write(
            np.arange(SLOTS),
            np.where(smaller, tokens, NO_TOKEN),
            np.where(smaller, parents, ROOT),
            computed,
            [{} for _ in range(SLOTS)],
        )
    known = np.where(exists, parents, ROOT)
    for buffer, values in (
        (buffers.tokens, np.where(exists, tokens, 0)),
        (buffers.parents, np.where(exists, parents, NO_NODE)),
        (buffers.depths, node_depths(known)),
        (buffers.bits, ancestor_bits(known)),
    ):
        buffer[:SLOTS] = torch.tensor(values)
    # A prefix of each tree has rows; some requests have other rows, or none but one.
    scheduled = np.array([rng.integers(0, sizes[slot] + 1) for slot in slots])
    more = rng.integers(0, 2, num_reqs)
    starts = np.concatenate([[0], np.cumsum(1 + scheduled + more)]).astype(np.int32)
    positions = np.concatenate([
        computed[slot] + np.arange(count)
        for slot, count in zip(slots, np.diff(starts), strict=True)
    ])  # fmt: skip
    batch = SimpleNamespace(
        idx_mapping=torch.from_numpy(slots),
        idx_mapping_np=slots,
        num_draft_tokens_per_req=scheduled.astype(np.int32),
        query_start_loc_np=starts,
        # vLLM's buffer is longer.
        positions=torch.from_numpy(np.append(positions, [7, 7])),
    )
    on_host = table.plan_step(slots, scheduled, starts, computed[slots])
    device_computed = torch.from_numpy(computed.astype(np.int32))
    drafted = np.ones(num_reqs, bool)
    plan = DevicePlan.of(batch, drafted, buffers, device_computed)
    assert (plan is None) == (on_host is None)
    if plan is None:
        return
    assert plan.is_tree.tolist() == on_host.is_tree.tolist()
    assert plan.num_rows.tolist() == on_host.num_rows.tolist()
    num_rows = int(starts[-1])
    rows, expected = plan.tree_rows(CPU, num_rows), on_host.tree_rows(CPU, num_rows)
    # Of rows that are in no tree nobody reads the bits.
    in_tree = np.repeat(plan.is_tree, np.diff(starts))
    assert rows.ancestor_bits[in_tree].equal(expected.ancestor_bits[in_tree])
    assert rows.is_tree.equal(expected.is_tree)
    assert rows.context_lens.equal(expected.context_lens)
    assert rows.all_tree == expected.all_tree
    assert plan.positions_on(CPU).equal(on_host.positions_on(CPU))
    drafts, above = plan.drafts_and_parents(CPU)
    host_drafts, host_above = on_host.drafts_and_parents(CPU)
    is_root = np.zeros(len(drafts), bool)
    counts = np.maximum(plan.num_rows, 1)
    is_root[np.cumsum(counts) - counts] = True
    assert drafts[~is_root].equal(host_drafts[~is_root])
    for i in plan.tree_requests():
        nodes = slice(0, plan.num_rows[i] - 1)
        assert above[i, nodes].equal(host_above[i, nodes])
        paths = plan.paths(i)
        assert [path[-1:] for path in on_host.paths(i)] == paths


def test_rows_of_requests_that_were_not_drafted_for_are_no_tree():
    buffers = TreeBuffers(SLOTS, NODES, NODES, CPU)
    buffers.depths[:, 1:] = 1
    batch = SimpleNamespace(
        idx_mapping=torch.tensor([3, 1]),
        idx_mapping_np=np.array([3, 1]),
        num_draft_tokens_per_req=np.array([2, 2], np.int32),
        query_start_loc_np=np.array([0, 3, 6], np.int32),
        positions=torch.tensor([4, 5, 6, 9, 10, 11]),
    )
    computed = torch.full((SLOTS,), 4, dtype=torch.int32)
    plan = DevicePlan.of(batch, np.array([True, False]), buffers, computed)
    assert plan.is_tree.tolist() == [True, False]
    assert plan.positions_on(CPU).tolist() == [4, 5, 5, 9, 10, 11]
    assert DevicePlan.of(batch, np.array([False, False]), buffers, computed) is None
