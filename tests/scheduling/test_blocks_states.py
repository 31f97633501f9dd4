"""Whatever requests do, no block is lost, shared or written to by two of them."""

import itertools
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from vllm.v1.core.sched.scheduler import Scheduler

from tests.scheduling import block_worker
from tests.scheduling.block_worker import (
    MAX_LEN,
    NUM_BLOCKS,
    NUM_NODES,
    AsyncEngine,
    Engine,
)
from vllm_specinfer.scheduling.blocks import SlotsOfTrees
from vllm_specinfer.scheduling.scheduler import SpecInferScheduler
from vllm_specinfer.scheduling.step_stats import RETURNED_BLOCKS, SHORT_STEPS


class Blocks(RuleBasedStateMachine):
    """Requests come, run, leave and are preempted; every step checks all blocks."""

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed):
        self.engine = Engine(block_worker.make_scheduler(), seed)

    @rule(
        length=st.integers(1, MAX_LEN - 2),
        text=st.integers(0, 2),
        max_tokens=st.integers(1, MAX_LEN),
    )
    def add(self, length, text, max_tokens):
        self.engine.add(length, text, max_tokens)

    @rule(steps=st.integers(1, 6), most_nodes=st.integers(0, NUM_NODES))
    def steps(self, steps, most_nodes):
        for _ in range(steps):
            self.engine.step(most_nodes)

    @rule(number=st.integers(0, 9))
    def abort(self, number):
        self.engine.abort(number)

    @rule()
    def preempt_all(self):
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    def teardown(self):
        if hasattr(self, "engine"):
            drain(self.engine)


def drain(engine):
    """All requests end, and every block is free but vLLM's null block."""
    for _ in range(1000):
        if not engine.scheduler.has_requests():
            break
        engine.step(NUM_NODES)
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


def traffic(seed):
    """An engine after some requests that want more blocks than there are."""
    engine = Engine(block_worker.make_scheduler(), seed)
    for number in range(20):
        engine.add(1 + number % 13, number % 3, MAX_LEN)
    drain(engine)
    return engine


def test_short_of_blocks_trees_give_back_theirs_and_fewer_requests_are_preempted():
    engines = [traffic(seed) for seed in range(20)]
    for engine in engines:
        assert engine.scheduler._blocks[SHORT_STEPS] > 0
    assert sum(e.scheduler._blocks[RETURNED_BLOCKS] for e in engines) > 0
    with mock.patch.object(SpecInferScheduler, "schedule", Scheduler.schedule):
        kept = [traffic(seed).preemptions for seed in range(20)]
    num_preemptions = sum(e.preemptions for e in engines)
    assert num_preemptions < 0.6 * sum(kept)
    with mock.patch.object(SlotsOfTrees, "cut_drafts"):
        kept = [traffic(seed).preemptions for seed in range(20)]
    assert num_preemptions < 0.9 * sum(kept)


def test_no_tree_is_dropped_for_its_size():
    """Else a stochastic rule would not test unlikely draws as often as likely ones."""
    dropped = 0
    for seed, num_steps in itertools.product(range(8), range(4, 24, 4)):
        have_trees = set()
        for num_nodes in range(1, NUM_NODES + 1):
            engine = Engine(block_worker.make_scheduler(), seed)
            for number in range(6):
                engine.add(1 + number % 13, number % 3, MAX_LEN)
            for _ in range(num_steps):
                engine.step(NUM_NODES)
            *_, last = engine.scheduler.running
            if last.is_prefill_chunk:
                break
            last.spec_token_ids = [7] * num_nodes
            output = engine.scheduler.schedule()
            drafts = output.scheduled_spec_decode_tokens.get(last.request_id, [])
            have_trees.add(bool(drafts))
        assert len(have_trees) < 2, (seed, num_steps)
        dropped += have_trees == {False}
    assert dropped > 3


class AsyncBlocks(Blocks):
    """The same with asynchronous scheduling."""

    @initialize(seed=st.integers(0, 1 << 32))
    def begin(self, seed):
        self.engine = AsyncEngine(block_worker.make_scheduler(True), seed)


TestBlocks = Blocks.TestCase
TestAsyncBlocks = AsyncBlocks.TestCase
TestBlocks.settings = TestAsyncBlocks.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
