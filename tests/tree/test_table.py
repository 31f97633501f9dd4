"""A slot's tree is planned for exactly the step it was written for."""

from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.token_trees import bits_of, depths_of, first_nodes
from vllm_specinfer.tree.candidates import FinishedTrees
from vllm_specinfer.tree.table import NO_TREE, TreeTable
from vllm_specinfer.tree.token_tree import ROOT, TokenTree

SLOTS, NODES = 5, 70
some_slots = st.lists(
    st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True
)


class Tables(RuleBasedStateMachine):
    """A table beside a dictionary of what its slots should hold."""

    def __init__(self) -> None:
        super().__init__()
        self.table = TreeTable(SLOTS, NODES)
        # Root position, tokens, parents and draws of live trees.
        self.live: dict[int, tuple[int, np.ndarray, np.ndarray, dict]] = {}

    @rule(slots=some_slots, data=st.data())
    def write(self, slots, data):
        seed = data.draw(st.integers(0, 1 << 32))
        rng = np.random.default_rng(seed)
        shape = len(slots), NODES
        parents = rng.integers(ROOT, np.arange(NODES), shape, np.int32)
        roots = rng.integers(0, 4, len(slots))
        draws = [{ROOT: [], slot: []} for slot in slots]
        tokens = rng.integers(0, 1000, shape)
        trees = replace(FinishedTrees.none(*shape), tokens=tokens, parents=parents)
        self.table.write(np.array(slots), trees, roots, draws)
        for slot, *tree in zip(
            slots, roots.tolist(), tokens, parents, draws, strict=True
        ):
            self.live[slot] = tuple(tree)

    @rule(slots=some_slots)
    def drop_a_batch(self, slots):
        self.table.drop(np.array(slots))
        for slot in slots:
            self.live.pop(slot, None)

    @rule(slot=st.integers(0, SLOTS - 1))
    def drop_one(self, slot):
        self.table.drop(slot)
        self.live.pop(slot, None)

    @rule(slots=some_slots, data=st.data())
    def plan(self, slots, data):
        computed, drafts, extra = (
            np.array([data.draw(st.integers(0, most)) for _ in slots])
            for most in (3, NODES, 1)
        )
        # Half of the time a slot is at its own root.
        for i, slot in enumerate(slots):
            if slot in self.live and data.draw(st.booleans()):
                computed[i] = self.live[slot][0]
        starts = np.concatenate([[0], np.cumsum(drafts + 1 + extra)])
        plan = self.table.plan_step(np.array(slots), drafts, starts, computed)
        expected = [
            slot in self.live
            and self.live[slot][0] == computed[i]
            and drafts[i] > 0
            and not extra[i]
            for i, slot in enumerate(slots)
        ]
        if plan is None:
            assert not any(expected)
            return
        assert plan.is_tree.tolist() == expected
        assert plan.all_tree == all(expected)
        total = int(starts[-1])
        positions, bits = plan.positions(), plan.ancestor_bits(total)
        assert len(positions) == total
        for i, slot in enumerate(slots):
            rows = slice(starts[i], starts[i + 1])
            if not expected[i]:
                flat = np.arange(starts[i + 1] - starts[i]) + computed[i]
                assert (positions[rows] == flat).all() and not bits[rows].any()
                continue
            root, tokens, parents, _ = self.live[slot]
            assert (self.table.tokens[slot] == tokens).all()
            tree = first_nodes(TokenTree(np.arange(NODES), parents), drafts[i])
            assert positions[rows].tolist() == [root, *(root + depths_of(tree))]
            words = bits_of(tree).shape[1]
            assert (bits[rows, :words] == bits_of(tree)).all()
            assert not bits[rows, words:].any()

    @invariant()
    def slots_hold_what_was_written_last(self):
        for slot in range(SLOTS):
            root, *_, draws = self.live.get(slot, (NO_TREE, None))
            assert self.table.root_positions[slot] == root
            assert draws is None or self.table.draws[slot] is draws


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
