"""Which blocks trees give back, and when."""

from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specinfer.scheduling import blocks
from vllm_specinfer.scheduling.blocks import SlotsOfTrees

SIZE, MAX_LEN = 4, 30


class Pool:
    """Free blocks, in the order in which they came back."""

    def __init__(self, free):
        self.free = list(range(900, 900 + free))

    def get_num_free_blocks(self):
        return len(self.free)

    def free_blocks(self, blocks):
        self.free += blocks


class Running(SimpleNamespace):
    """A request as vLLM has it; its next step runs a token and the drafts."""

    num_output_placeholders = num_in_flight_tokens = 0

    @property
    def num_tokens_with_spec(self):
        return self.num_computed_tokens + 1 + len(self.spec_token_ids)


def make(free, max_num_tokens=16, **held):
    """Requests by name with (tokens computed, rows, blocks)."""
    running, group = [], SimpleNamespace(block_size=SIZE, req_to_blocks={})
    for number, (req_id, (computed, rows, num_blocks)) in enumerate(held.items()):
        group.req_to_blocks[req_id] = [100 * number + i for i in range(num_blocks)]
        running.append(
            Running(
                request_id=req_id,
                num_computed_tokens=computed,
                spec_token_ids=[7] * (rows - 1),
            )
        )
    pool = Pool(free)
    coordinator = SimpleNamespace(single_type_managers=[group])
    manager = SimpleNamespace(block_pool=pool, coordinator=coordinator)
    return SlotsOfTrees(manager, MAX_LEN, max_num_tokens), running, pool, group


@pytest.mark.parametrize(
    ("request_", "lookahead", "missing"),
    [
        ((7, 1, 2), 0, 0),  # the last slot of the second block
        ((7, 1, 2), 1, 1),
        ((8, 5, 2), 0, 2),
        ((8, 5, 3), 4, 2),
        ((0, 1, 4), 3, 0),  # more than it needs
        ((24, 9, 8), 9, 0),  # 30 slots are all it may have
        ((0, 90, 1), 1, 4),  # of a long prompt 16 tokens are run
    ],
)
def test_a_step_lacks_what_its_rows_and_lookahead_need(request_, lookahead, missing):
    slots, running, *_ = make(free=0, r=request_)
    assert slots.missing(running, lookahead) == missing


def test_all_requests_share_the_free_blocks_and_the_rows_of_a_step():
    of_all = {"a": (8, 8, 2), "b": (8, 9, 2), "c": (8, 8, 2)}
    slots, running, *_ = make(free=3, **of_all)
    # a and b run 8 rows each, two blocks; none are left for c.
    assert slots.missing(running, 0) == 1
    slots, running, *_ = make(free=4, **of_all)
    assert slots.missing(running, 0) == 0
    slots, running, *_ = make(free=90, **of_all)
    assert slots.missing(running, 4) <= 0


def test_of_a_long_prompt_a_step_runs_as_much_as_vllm_lets_it():
    slots, running, *_ = make(free=0, a=(0, 90, 0), b=(8, 5, 2))
    # 13 rows and 3 others; the lookahead is one slot each.
    assert slots.missing(running, 1) == 5
    slots.most_of_one = 3
    assert slots.missing(running, 1) == 2
    slots.most_of_one = 5
    assert slots.missing(running, 1) == 4


def test_no_more_is_given_back_than_is_asked_for_and_rows_keep_their_blocks():
    of_all = {"a": (5, 3, 4), "b": (5, 2, 4), "c": (4, 4, 4)}
    slots, running, pool, group = make(free=0, **of_all)
    # 9 slots, then 8.
    assert slots.give_back(running, 1, num_blocks=2) == {"a": [3], "b": [2]}
    assert pool.free == [3, 103, 102]
    assert [len(held) for held in group.req_to_blocks.values()] == [3, 2, 4]
    assert slots.give_back(running, 1, num_blocks=9) == {"c": [3]}
    assert slots.give_back(running, 1, num_blocks=9) == {}
    assert slots.give_back(running, 1, num_blocks=0) == {}


def test_a_request_in_flight_keeps_all_its_blocks():
    slots, running, pool, _ = make(free=0, a=(4, 1, 4), b=(4, 1, 4))
    running[0].num_in_flight_tokens = 1
    assert slots.give_back(running, 1, num_blocks=9) == {"b": [2]}
    assert pool.free == [103, 102]


def test_trees_are_cut_to_what_fits_into_their_blocks_first():
    of_all = {"a": (5, 6, 2), "b": (4, 3, 2), "c": (7, 7, 2), "d": (2, 4, 3)}
    slots, running, *_ = make(free=0, max_num_tokens=99, **of_all)
    missing = slots.missing(running, 1)
    assert missing == 3
    slots.cut_drafts(running, 1, missing, None)
    # Eight slots hold c's text of eight: it keeps a node all the same.
    assert [len(request.spec_token_ids) for request in running] == [1, 2, 1, 3]
    assert slots.missing(running, 1) == 1


@pytest.mark.parametrize(("in_flight", "cut"), [(False, "cd"), (True, "abcd")])
@pytest.mark.parametrize("num_kept", [0, 1])
def test_the_last_trees_are_cut_until_that_saves_enough(in_flight, cut, num_kept):
    # Blocks saved: two by c, one by a, none by b; d gives one back unless in flight.
    of_all = {"a": (5, 6, 2), "b": (4, 3, 2), "c": (5, 7, 2), "d": (2, 8, 3)}
    slots, running, *_ = make(free=0, max_num_tokens=99, **of_all)
    for request in running:
        request.num_in_flight_tokens = int(in_flight)
    slots.cut_drafts(running, 1, num_blocks=0, num_kept=num_kept)
    assert all(len(request.spec_token_ids) > 1 for request in running)
    slots.cut_drafts(running, 1, num_blocks=3, num_kept=num_kept)
    found = [r.request_id for r in running if len(r.spec_token_ids) == num_kept]
    assert "".join(found) == cut


def test_tables_end_with_the_blocks_that_are_left():
    tables = SimpleNamespace(num_blocks=SimpleNamespace(np=np.full((2, 3), 9)))
    blocks.shorten(tables, {"a": 2, "b": 0}, {"a": [4, 5]})
    assert tables.num_blocks.np.tolist() == [[9, 9, 4], [9, 9, 5]]
