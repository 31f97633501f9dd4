"""What the budget learns from timings and acceptance, and what it then admits."""

import numpy as np
import pytest

from vllm_specinfer.scheduling.budget import TRY_AGAIN, Budget, StepCost


def measured(start, slope, rows, noise=0.0, seed=0):
    """A cost that has seen steps of these rows."""
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for n in rows:
        cost.observe(n, (start + slope * n) * (1 + noise * rng.standard_normal()))
    return cost


def test_a_line_is_found_through_noise():
    rows = np.random.default_rng(1).integers(1, 80, 300)
    cost = measured(10e-3, 0.4e-3, rows, noise=0.1)
    for n in (1, 9, 40, 80):
        assert cost.seconds(n) == pytest.approx(10e-3 + 0.4e-3 * n, rel=0.1)


def test_steps_of_one_size_leave_the_slope_to_the_prior():
    cost = measured(10e-3, 0.4e-3, [9] * 100)
    assert cost.seconds(9) == pytest.approx(13.6e-3, rel=0.01)
    assert 1.1 < cost.seconds(9) / cost.seconds(1) < 1.6


def test_a_pause_is_forgotten_and_a_slower_machine_is_believed():
    cost = measured(10e-3, 0.4e-3, [9] * 50)
    cost.observe(9, 2.0)
    assert cost.seconds(9) == pytest.approx(13.6e-3, rel=0.01)
    for _ in range(20):
        cost.observe(9, 0.1)
    assert cost.seconds(9) == pytest.approx(0.1, rel=0.05)


def test_cost_follows_a_drift():
    cost = measured(10e-3, 0.4e-3, [9, 17] * 50)
    for _ in range(300):
        cost.observe(9, 2 * 13.6e-3)
        cost.observe(17, 2 * 16.8e-3)
    assert cost.seconds(17) == pytest.approx(33.6e-3, rel=0.02)


def test_walking_trees_is_told_from_the_rows():
    cost = StepCost()
    rng = np.random.default_rng(2)
    for n in range(200):
        rows = int(rng.integers(8, 72))
        trees = n % 8 > 0
        rows = rows if trees else 8
        cost.observe(rows, 10e-3 + 0.2e-3 * rows + 4e-3 * trees, trees)
    assert cost.seconds(8) == pytest.approx(11.6e-3, rel=0.05)
    assert cost.seconds(40, True) == pytest.approx(22e-3, rel=0.05)
    both = cost.seconds(np.array([8, 40]), np.array([False, True]))
    assert both == pytest.approx([cost.seconds(8), cost.seconds(40, True)])


def test_now_and_then_a_step_goes_without_nodes():
    budget = Budget(8)
    plain = [n for n in range(200) if budget.goes_plain()]
    assert (
        plain
        == [0, 2, 4, 4 + TRY_AGAIN, 4 + 2 * TRY_AGAIN, 4 + 3 * TRY_AGAIN][: len(plain)]
    )
    assert len(plain) > 4


def a_budget(start, slope, draft, num_nodes=8):
    budget = Budget(num_nodes)
    for n in range(1, 200):
        budget.observe_step(n % 64 + 1, start + slope * (n % 64 + 1), False)
        budget.observe_draft(n % 8 + 1, draft)
    return budget


def best_by_hand(start, slope, chances):
    """Number of nodes, of all requests together, with the most tokens per second."""
    best = sorted(chances.ravel(), reverse=True)
    rates = [
        (len(chances) + sum(best[:k])) / (start + slope * (len(chances) + k))
        for k in range(len(best) + 1)
    ]
    return int(np.argmax(rates)), best


@pytest.mark.parametrize("slope", [0.01e-3, 0.4e-3, 1e-3, 3e-3])
@pytest.mark.parametrize("num_reqs", [1, 5])
def test_nodes_are_admitted_while_they_raise_tokens_per_second(slope, num_reqs):
    budget = a_budget(10e-3, slope, 1e-3)
    rng = np.random.default_rng(num_reqs)
    chances = np.sort(rng.uniform(0.02, 0.95, (num_reqs, 8)), axis=1)[:, ::-1]
    least = budget.least_score(np.log(chances), drafted=True)
    count, best = best_by_hand(10e-3, slope, chances)
    admitted = int((chances >= np.exp(least) * (1 - 1e-6)).sum())
    # The fitted line is a little off: so may be the number of nodes.
    low, high = sorted((admitted, count))
    assert high - low <= 1 + num_reqs, (admitted, count)


def test_rows_for_nothing_admit_everything_and_dear_rows_nothing():
    chances = np.log(np.full((4, 8), 0.3))
    assert a_budget(10e-3, 0, 0).least_score(chances, True) <= chances.min()
    assert a_budget(1e-4, 10e-3, 0).least_score(chances, True) == np.inf


def test_drafting_stops_where_it_does_not_pay_and_is_tried_again():
    budget = a_budget(10e-3, 0.4e-3, 3e-3)
    assert budget.drafts(1)  # nothing known yet
    budget.least_score(np.log(np.full((1, 8), 0.6)), drafted=True)
    assert budget.drafts(1)
    for _ in range(400):  # a source that nobody believes any more
        budget.least_score(np.log(np.full((1, 8), 0.01)), drafted=True)
    tried = [budget.drafts(1) for _ in range(3 * TRY_AGAIN)]
    times = [n for n, drafted in enumerate(tried) if drafted]
    first = TRY_AGAIN - 1
    again = first + TRY_AGAIN + 1
    assert times == [first, first + 1, again, again + 1]


def test_many_requests_make_drafting_not_worth_its_rows():
    budget = a_budget(10e-3, 2e-3, 2e-3)
    budget.least_score(np.log(np.full((1, 8), 0.2)), drafted=True)
    assert not budget.drafts(64)
