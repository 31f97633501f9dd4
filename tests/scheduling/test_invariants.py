"""What VLLM_SPECINFER_DEBUG=1 checks is seen where it does not hold."""

import pytest

from tests.scheduling.block_worker import Engine, make_scheduler
from vllm_specinfer.flags import DEBUG_ENV
from vllm_specinfer.scheduling import invariants


@pytest.fixture
def engine():
    """Two requests under way, both with blocks of their own."""
    engine = Engine(make_scheduler(), 0)
    for text in range(2):
        engine.add(length=9, text=text, max_tokens=20)
    for _ in range(3):
        engine.step(4)
    invariants.check_blocks(engine.scheduler)
    return engine


def blocks_of(engine, req_id="1"):
    (group,) = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    return group.req_to_blocks[req_id]


def test_blocks_that_are_lost_or_held_wrongly_are_named(engine):
    scheduler, blocks = engine.scheduler, blocks_of(engine)
    pool = scheduler.kv_cache_manager.block_pool

    def must_say(sentence):
        with pytest.raises(RuntimeError, match=sentence):
            invariants.check_blocks(scheduler)

    taken = blocks.pop()
    must_say("1's blocks must hold|every block must be free or held; got 1 that")
    blocks.append(taken)
    taken.ref_cnt += 1
    must_say(f"block {taken.block_id} must count its 1 holders; got 2")
    taken.ref_cnt -= 1
    blocks_of(engine, "2").append(taken)
    must_say(f"block {taken.block_id} must count its 2 holders; got 1")
    taken.ref_cnt += 1
    must_say(f"{taken.block_id} of 2 requests must be in the prefix cache; got one")
    blocks_of(engine, "2").pop()
    taken.ref_cnt -= 1
    pool.free_block_queue.append(taken)
    must_say("free blocks must not be held")
    pool.free_block_queue.remove(taken)
    invariants.check_blocks(scheduler)


def test_a_request_that_is_gone_holds_nothing(engine):
    scheduler = engine.scheduler
    request = scheduler.requests.pop("1")
    with pytest.raises(RuntimeError, match="must belong to a live request; got 1"):
        invariants.check_blocks(scheduler)
    scheduler.requests["1"] = request


def test_a_workers_table_that_differs_is_named(engine):
    worker, manager = engine.worker, engine.scheduler.kv_cache_manager
    expected = {"1": manager.get_block_ids("1")}
    invariants.check_tables(worker.tables, worker.slots, expected)
    worker.table[worker.slots["1"], 0] += 1
    with pytest.raises(RuntimeError, match="1's table must be"):
        invariants.check_tables(worker.tables, worker.slots, expected)


@pytest.mark.parametrize(("value", "checks"), [("1", True), ("0", False)])
def test_the_user_switches_it_on(monkeypatch, value, checks):
    monkeypatch.setenv(DEBUG_ENV, value)
    seen, check = [], invariants.check_blocks
    monkeypatch.setattr(
        invariants, "check_blocks", lambda s: seen.append(s) or check(s)
    )
    engine = Engine(make_scheduler(checked=None), 0)
    engine.add(length=4, text=0, max_tokens=3)
    engine.step(2)
    assert bool(seen) == checks
