"""When the budget does what seems not to pay, to know what it costs and brings."""

import numpy as np
import pytest

from tests.scheduling.budgets import a_budget
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.cost import MAX_CHEAP
from vllm_specinfer.scheduling.exploration import (
    FIRST_PAUSE,
    FIRST_PLAIN_STEPS,
    LONGER,
    LONGEST_RUN,
    LOST_IN_PLAIN,
    LOST_IN_TRIES,
    SHORTEST_PAUSE,
    SHORTEST_RUN,
    TRIES,
)
from vllm_specinfer.scheduling.load_budget import (
    CAUTION,
    FLAT_DRAFTS,
    LoadBudget,
)


def test_now_and_then_a_step_goes_without_nodes():
    budget = LoadBudget(8)
    plain = [n for n in range(150) if not budget.grows(1)]
    assert plain == [0, 2, 4, *range(4 + SHORTEST_RUN, 150, SHORTEST_RUN)]
    assert all(Budget().grows(1) for _ in range(150))


def test_a_step_without_nodes_is_the_rarer_the_more_it_loses():
    def between(chance):
        budget = a_budget(10e-3, 0.1e-3, 0.1e-3)
        for _ in range(40):
            budget.least_score(np.log([[chance, *[0.01] * 7]]), drafted=True)
        for _ in range(FIRST_PLAIN_STEPS + 1):
            while budget.grows(1):
                pass
        return next(n for n in range(1, 1000) if not budget.grows(1))

    # A node and its draft take 0.3 ms; without them one of 1.27 tokens in 10.4 ms is
    # one in 10.1.
    lost = 1 - 10.4 / 10.1 / (1 + CAUTION * 0.3)
    assert SHORTEST_RUN < between(0.3) < between(0.9) < LONGEST_RUN
    assert between(0.3) == pytest.approx(lost / LOST_IN_PLAIN, rel=0.2)
    assert between(0.01) == SHORTEST_RUN


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again():
    budget = a_budget(10e-3, 0.4e-3, 1e-3)
    assert budget.drafts(1)  # nothing known yet
    budget.least_score(np.log(np.full((1, 8), 0.6)), drafted=True)
    assert budget.drafts(1)
    for _ in range(400):  # a source that nobody believes any more
        budget.least_score(np.log(np.full((1, 8), 0.01)), drafted=True)

    def tries(num_steps):
        tried = [budget.drafts(1) for _ in range(num_steps)]
        return [n for n, drafted in enumerate(tried) if drafted]

    # 10.8 ms with a node, 3 ms for its draft of two levels, 10.4 ms without.
    tried = tries(2000)
    first, second, third, fourth = tried[: 4 * TRIES : TRIES]
    assert tried[:TRIES] == list(range(first, first + TRIES))
    assert first == FIRST_PAUSE and second - first - TRIES == FIRST_PAUSE * LONGER
    usual = fourth - third - TRIES
    assert TRIES * 0.26 / LOST_IN_TRIES < usual < TRIES * 0.36 / LOST_IN_TRIES
    assert third - second - TRIES == pytest.approx(usual, rel=0.05)
    for _ in range(400):  # almost worth it
        budget.least_score(np.log(np.full((1, 8), 0.07)), drafted=True)
    assert 2 * SHORTEST_PAUSE < np.diff(tries(1000)).max() < usual / 2
    for _ in range(400):
        budget.least_score(np.log(np.full((1, 8), 0.6)), drafted=True)
    assert budget.drafts(1)
    for _ in range(400):
        budget.least_score(np.log(np.full((1, 8), 0.01)), drafted=True)
    assert tries(400)[0] == FIRST_PAUSE


def test_what_a_try_catches_up_with_is_lost_too():
    budget = a_budget(10e-3, 0.4e-3, 1e-3)
    for _ in range(400):
        budget.least_score(np.log(np.full((1, 8), 0.01)), drafted=True)
    budget.observe_draft(1, 1000, 0, 100e-3)  # 0.1 ms a token

    def pause(unread):
        for _ in range(TRIES - 1):
            budget.drafts(1)
        return next(n for n in range(5000) if budget.drafts(1, unread))

    for _ in range(4):
        pause(500)  # the first ones are shorter
    usual = pause(0)
    # 10.4 ms is a step without nodes; a text grows while nothing is drafted.
    assert pause(500) == pytest.approx(usual + 50 / 10.4 / LOST_IN_TRIES, rel=0.05)
    assert pause(2) < 1.2 * usual


def test_a_text_where_it_pays_is_told_from_the_one_before():
    budget = a_budget(10e-3, 0.4e-3, 1e-3)
    budget.observe_draft(1, 1000, 0, 100e-3)  # 0.1 ms a token of the prompt
    for _ in range(200):
        budget.least_score(np.log(np.full((1, 8), 0.03)), drafted=True)
    assert not budget.drafts(1)
    unread, asked = 100, []
    for _ in range(128):
        asked.append(budget.drafts(1, unread))
        unread = 1 if asked[-1] else unread + 1
        if asked[-1]:
            budget.least_score(np.log(np.full((1, 8), 0.6)), drafted=True)
    assert not asked[0] and all(asked[FIRST_PAUSE:])


def levels_drafted(budget, rng, steps, slower, step_slower=2):
    """How many levels these steps have had at last, in the mean of 100.

    Args:
        slower: What drafts take of their usual time, either at random; none where the
            machine is not busy.
        step_slower: How many times as long steps take, where it is.
    """
    chances = np.array([[0.6, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1, 0.1]])
    unread, depths = 100, []
    for _ in range(steps):
        asked = budget.grows(1) and budget.drafts(1, unread)
        unread = 1 if asked else unread + 1
        rows, levels = 1, 0
        if asked:
            if budget.worth().expands(np.log(chances[0, :4])).any():
                levels = int(rng.integers(1, 4))
            seconds = 2e-3 + 0.1e-3 * unread + 1e-3 * levels
            seconds *= rng.choice(slower) if slower else 1
            budget.observe_draft(1, unread + levels, levels, seconds)
            least = budget.least_score(np.log(chances), drafted=True)
            rows += int((np.log(chances) >= least).sum())
        depths.append(levels)
        seconds = (step_slower if slower else 1) * (16e-3 + 0.6e-3 * rows)
        budget.observe_step(rows, seconds, rows > 1)
    return np.mean(depths[-100:])


@pytest.mark.parametrize("step_slower", [2, 5])
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("busy_steps", [60, 300, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_what_a_busy_machine_has_taught_is_unlearned(
    seed, busy_steps, restarts, step_slower
):
    budget, rng = LoadBudget(8), np.random.default_rng(seed)
    levels_drafted(budget, rng, busy_steps, (2, 16), step_slower)
    if restarts:
        learned, budget = budget.learned(), LoadBudget(8)
        budget.recall(learned)
    assert levels_drafted(budget, rng, 1000, slower=()) > 1.5


def test_a_quick_plain_step_does_not_make_trees_look_dear():
    budget, scores = LoadBudget(8), np.log([[0.45, 0.26, 0.17, 0.12, *[0.05] * 4]])

    def tree_step(slower):
        budget.observe_draft(1, 9, 2, slower * 5e-3)
        budget.least_score(scores, drafted=True)
        budget.observe_step(9, slower * 16e-3, True)

    budget.observe_step(1, 5 * 11e-3, False)
    for _ in range(500):
        tree_step(slower=5)
    # The machine is not busy any more.
    for _ in range(MAX_CHEAP):
        tree_step(slower=1)
    budget.observe_step(1, 11e-3, False)
    assert budget.drafts(1)
    assert budget._step.seconds(9, True) < 25e-3


def test_tries_that_cost_far_less_than_foretold_are_not_the_last():
    # Nothing is known of a draft but what it took where it took 8 or 100 times as long.
    found = []
    for seed in range(4):
        budget, rng = LoadBudget(8), np.random.default_rng(seed)
        levels_drafted(budget, rng, 300, slower=(8, 100))
        found.append(levels_drafted(budget, rng, 600, slower=()))
    assert min(found) > 1.5


def test_levels_that_seem_too_dear_are_run_now_and_then():
    budget = a_budget(10e-3, 0.4e-3, 1e-3)
    budget.least_score(np.log(np.full((1, 8), 0.4)), drafted=True)
    for _ in range(200):
        budget.observe_draft(1, 2, 0, 1e-3)
        budget.observe_draft(1, 9, 2, 1e-3 + 2 * 4e-3)
    nodes = np.log([0.6, 0.2])

    def drafts_before_a_level():
        count = 0
        while not budget.worth().expands(nodes).any():
            budget.observe_draft(1, 2, 0, 1e-3)
            count += 1
        budget.observe_draft(1, 9, 2, 1.6e-3)
        return count

    assert drafts_before_a_level() == FLAT_DRAFTS
    # Levels are not dear any more.
    assert sum(drafts_before_a_level() for _ in range(40)) <= 2 * FLAT_DRAFTS
    assert drafts_before_a_level() == 0


def test_every_other_try_has_levels_that_do_not_pay():
    budget = a_budget(10e-3, 0.4e-3, 4e-3)
    for _ in range(400):
        budget.least_score(np.log(np.full((1, 8), 0.05)), drafted=True)
    while not budget.drafts(1):
        pass
    deep = [budget.worth().expands(np.log([0.5])).any()]
    for _ in range(TRIES - 1):
        assert budget.drafts(1)
        deep.append(budget.worth().expands(np.log([0.5])).any())
    assert deep == [True, False] * (TRIES // 2)
    assert not budget.drafts(1)
