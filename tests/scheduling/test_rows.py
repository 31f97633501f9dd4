"""Rows of a step are everybody's: trees leave some to other requests and to prompts."""

from dataclasses import replace

import pytest

from tests.scheduling.block_worker import (
    NUM_NODES,
    SLOTS,
    AsyncEngine,
    Engine,
    make_scheduler,
    vllm_config,
)
from vllm_specinfer.scheduling.step_stats import NO_ROOM, SCHEDULE, WorkerStats


def rows_of_steps(engine, num_steps):
    """What each request may run in each step, by request id."""
    steps, schedule = [], engine.scheduler.schedule

    def noted():
        steps.append(schedule())
        return steps[-1]

    engine.scheduler.schedule = noted
    for _ in range(num_steps):
        engine.step(NUM_NODES)
    return [output.num_scheduled_tokens for output in steps]


@pytest.fixture(params=[Engine, AsyncEngine])
def make(request):
    """Makes an engine with so many rows in a step, whose trees are full and wrong."""

    def made(num_rows):
        asynchronous = request.param is AsyncEngine
        engine = request.param(make_scheduler(asynchronous, num_rows), 0)
        engine.rng.randint, engine.rng.choice = max, min
        return engine

    return made


def test_a_schedule_that_vllm_drops_under_data_parallelism_is_kept(monkeypatch):
    spec = vllm_config(False).speculative_config
    assert spec.num_speculative_tokens_per_batch_size is None
    schedule = [[1, 2, 3], [3, SLOTS, 0]]
    options = replace(spec.options, batch_schedule=schedule)
    monkeypatch.setattr(spec, "options", options)
    scheduler = make_scheduler()
    assert scheduler.dynamic_sd_lookup[1:] == [3, 3, 0, 0]
    # A request without a node is one of the schedule's, not one without room.
    assert not scheduler._reasons


def test_no_request_waits_for_the_trees_of_others(make):
    # Two full trees are 14 rows.
    engine = make(2 * SLOTS)
    for text in range(SLOTS):
        engine.add(length=1, text=text, max_tokens=12)
    for rows in rows_of_steps(engine, 5)[1:]:
        assert len(rows) == SLOTS


def test_prompts_have_half_of_the_rows(make):
    engine = make(16)
    for text in range(2):
        engine.add(length=1, text=text, max_tokens=30)
    assert sum(rows_of_steps(engine, 2)[-1].values()) == 2 * (NUM_NODES + 1)
    engine.add(length=24, text=9, max_tokens=2)
    # The trees of the first of these steps are there already.
    assert [rows["3"] for rows in rows_of_steps(engine, 2)] == [2, 12]


@pytest.mark.parametrize(
    ("length", "rows"),
    [
        (26, {"1": 3, "2": 3, "3": 26}),
        (30, {"1": 1, "2": 1, "3": 30}),
        # In plain decoding it would wait, too.
        (31, {"1": 5, "2": 5}),
    ],
)
def test_a_prompt_in_one_piece_waits_for_no_tree(make, monkeypatch, length, rows):
    engine = make(32)
    config = engine.scheduler.scheduler_config
    monkeypatch.setattr(config, "enable_chunked_prefill", False)
    for text in range(2):
        engine.add(length=1, text=text, max_tokens=30)
    rows_of_steps(engine, 2)
    engine.add(length=length, text=9, max_tokens=2)
    # The trees of the first of these steps are there already.
    assert rows_of_steps(engine, 2)[-1] == rows


def test_trees_are_as_large_as_ever_where_there_is_room(make):
    engine = make(SLOTS * (NUM_NODES + 1))
    for text in range(SLOTS):
        engine.add(length=1, text=text, max_tokens=12)
    assert sum(rows_of_steps(engine, 3)[-1].values()) == SLOTS * (NUM_NODES + 1)


def test_sessions_that_wait_for_their_next_turn_leave_the_rows_to_others(monkeypatch):
    scheduler = make_scheduler()
    monkeypatch.setattr(scheduler, "get_request_counts", lambda: (1, 60))
    assert scheduler._most_nodes(NUM_NODES, {}) < NUM_NODES
    scheduler.num_waiting_for_streaming_input = 60
    assert scheduler._most_nodes(NUM_NODES, {}) == NUM_NODES


def test_requests_that_lack_blocks_to_join_leave_the_rows_to_others(monkeypatch):
    scheduler = make_scheduler()
    monkeypatch.setattr(scheduler, "get_request_counts", lambda: (2, 60))
    assert scheduler._most_nodes(NUM_NODES, {}) < NUM_NODES
    pool = scheduler.kv_cache_manager.block_pool
    monkeypatch.setattr(pool, "get_num_free_blocks", lambda: 0)
    assert scheduler._most_nodes(NUM_NODES, {}) == NUM_NODES
    # Those that hold some may go on in them.
    monkeypatch.setattr(scheduler, "kv_holding_waiting", [None, None])
    assert scheduler._most_nodes(NUM_NODES, {}) < NUM_NODES
    scheduler.num_waiting_for_streaming_input = 2  # it is they who hold them
    assert scheduler._most_nodes(NUM_NODES, {}) == NUM_NODES


def test_long_prompts_are_cut_as_vllm_cuts_them(monkeypatch):
    scheduler = make_scheduler(max_num_tokens=48)
    counts = [1, 0]
    monkeypatch.setattr(scheduler, "get_request_counts", lambda: counts)
    config = scheduler.scheduler_config
    assert scheduler._most_rows_of_one() == 48
    monkeypatch.setattr(config, "long_prefill_token_threshold", 8)
    assert scheduler._most_rows_of_one() == 48  # it is alone
    counts[:] = 1, 2
    assert scheduler._most_rows_of_one() == 8
    scheduler.adaptive_long_prefill_threshold = True
    assert scheduler._most_rows_of_one() == 16


@pytest.mark.parametrize("threshold", [1, 4])
def test_no_node_is_drafted_that_the_limit_of_prompts_cuts_off(
    make, monkeypatch, threshold
):
    engine = make(48)
    config = engine.scheduler.scheduler_config
    monkeypatch.setattr(config, "long_prefill_token_threshold", threshold)
    for text in range(2):
        engine.add(length=1, text=text, max_tokens=12)
    rows_of_steps(engine, 2)
    output = engine.scheduler.schedule()
    assert output.num_spec_tokens_to_schedule == threshold - 1
    assert set(output.num_scheduled_tokens.values()) == {threshold}


@pytest.mark.parametrize(("lookup", "lookahead"), [(False, NUM_NODES), (True, 1)])
def test_only_ssms_need_slots_to_draft_in(lookup, lookahead):
    scheduler = make_scheduler(lookup=lookup)
    assert scheduler.num_lookahead_tokens == lookahead


def test_requests_without_room_for_a_node_are_not_the_schedules():
    """The worker knows how many nodes it may draft, and that there is no schedule."""
    engine = Engine(make_scheduler(max_num_tokens=SLOTS), 0)
    for text in range(SLOTS):
        engine.add(length=1, text=text, max_tokens=12)
    engine.step(NUM_NODES)
    output = engine.scheduler.schedule()
    assert output.num_spec_tokens_to_schedule == 0
    found = engine.scheduler._stats_of(
        output, WorkerStats(reasons=dict.fromkeys("1234", SCHEDULE))
    )
    assert found.plain == {NO_ROOM: SLOTS}
