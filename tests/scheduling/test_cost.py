"""What is learned from timings: seconds per step, row and pass."""

import numpy as np
import pytest

from vllm_specinfer.scheduling.cost import CostLine


def measured(start, slope, rows, noise=0.0, seed=0):
    """A cost that has seen steps of these rows."""
    rng = np.random.default_rng(seed)
    cost = CostLine()
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


def test_small_trees_show_what_rows_cost():
    # As with float32 on Zen 4, where 9 rows cost twice as much as one.
    cost = CostLine()
    rng = np.random.default_rng(2)
    for rows in rng.choice(range(1, 10), 100).tolist():
        seconds = 11e-3 if rows == 1 else 9.3e-3 + 1.35e-3 * rows
        cost.observe(rows, seconds * (1 + 0.05 * rng.standard_normal()), rows > 1)
    for rows in (2, 5, 9):
        expected = 9.3e-3 + 1.35e-3 * rows
        assert cost.seconds(rows, 1.0) == pytest.approx(expected, rel=0.06)


def test_rows_are_padded_up_to_the_largest_size():
    sizes = [4, 16, 32]

    def computed(rows):
        return next((size for size in sizes if size >= rows), rows)

    cost = CostLine(sizes)
    for rows in np.random.default_rng(1).integers(1, 60, 300).tolist():
        cost.observe(rows, 10e-3 + 0.4e-3 * computed(rows))
    for rows in range(1, 60):
        expected = 10e-3 + 0.4e-3 * computed(rows)
        assert cost.seconds(rows) == pytest.approx(expected, rel=0.02)


def test_a_pause_is_forgotten_and_a_slower_machine_is_believed():
    cost = measured(10e-3, 0.4e-3, [9] * 50)
    cost.observe(9, 2.0)
    assert cost.seconds(9) == pytest.approx(13.6e-3, rel=0.01)
    for _ in range(20):
        cost.observe(9, 0.1)
    assert cost.seconds(9) == pytest.approx(0.1, rel=0.05)


def test_a_line_that_is_far_too_high_is_forgotten():
    cost = measured(50e-3, 2e-3, [9, 17] * 50)
    cost.observe(9, 0.8 * 68e-3)
    assert cost.seconds(9) > 66e-3
    cost.observe(9, 20e-3)
    cost.observe(9, 0.8 * 68e-3)
    cost.observe(9, 20e-3)
    assert cost.seconds(9) > 60e-3  # chance
    cost.observe(9, 25e-3, 1)
    cost.observe(9, 20e-3)
    assert cost.seconds(9) == pytest.approx(20e-3, rel=0.01)


def test_timings_that_nothing_has_followed_count_for_less():
    def after(count, seconds):
        cost = measured(10e-3, 0.4e-3, [9, 17] * 50)
        cost.fade(count)
        cost.observe(9, seconds)
        return cost.seconds(9)

    twice = 2 * 13.6e-3
    assert after(0, 13.6e-3) == pytest.approx(after(500, 13.6e-3), rel=0.05)
    assert after(0, twice) < 1.06 * 13.6e-3
    assert 1.1 * 13.6e-3 < after(80, twice) < 0.9 * after(10_000, twice)
    # As much as one timing they still count.
    assert after(10_000, twice) < 1.7 * 13.6e-3
    nothing = CostLine()
    nothing.fade(5)
    assert not nothing.known


def test_cost_follows_a_drift():
    cost = measured(10e-3, 0.4e-3, [9, 17] * 50)
    for _ in range(300):
        cost.observe(9, 2 * 13.6e-3)
        cost.observe(17, 2 * 16.8e-3)
    assert cost.seconds(17) == pytest.approx(33.6e-3, rel=0.02)


def test_walking_trees_is_told_from_the_rows():
    cost = CostLine()
    rng = np.random.default_rng(2)
    for n in range(200):
        rows = int(rng.integers(8, 72))
        trees = n % 8 > 0
        rows = rows if trees else 8
        cost.observe(rows, 10e-3 + 0.2e-3 * rows + 4e-3 * trees, trees)
    assert cost.seconds(8) == pytest.approx(11.6e-3, rel=0.05)
    assert cost.seconds(40, True) == pytest.approx(22e-3, rel=0.05)
    assert cost.marginal(5) == pytest.approx(1e-3, rel=0.1)
    assert cost.marginal(5, 1) == pytest.approx(5e-3, rel=0.1)


def test_few_rows_that_cost_less_each_do_not_make_plain_steps_look_cheap():
    rng = np.random.default_rng(4)
    cost = CostLine()

    def seconds(rows):
        return max(11e-3, 7.6e-3 + 0.5e-3 * rows)

    for n in range(400):
        rows = 4 if n % 20 == 0 else int(rng.integers(8, 18))
        noise = 1 + 0.05 * rng.standard_normal()
        cost.observe(rows, seconds(rows) * noise, rows > 4)
    # The line that larger steps lie on comes to 9.6 ms there.
    assert cost.seconds(4) == pytest.approx(seconds(4), rel=0.04)
    for rows in (8, 12, 17):
        assert cost.seconds(rows, True) == pytest.approx(seconds(rows), rel=0.04)


def test_what_is_rare_is_remembered_for_longer():
    cost = measured(10e-3, 0.4e-3, [4] * 50)
    for rows in [8, 12, 16] * 60:
        cost.observe(rows, 30e-3 + 0.2e-3 * rows, True)
    assert cost.seconds(4) == pytest.approx(11.6e-3, rel=0.05)
    assert cost.seconds(12, True) == pytest.approx(32.4e-3, rel=0.02)


def test_drafts_of_as_many_levels_are_as_many_passes_of_about_the_same():
    cost = CostLine(passes=True)
    for _ in range(100):
        cost.observe(16, 4e-3, 3)
    assert cost.seconds(16, 3) == pytest.approx(4e-3, rel=0.01)
    assert 0.8e-3 < cost.marginal(0, 1) < 1.2e-3
    assert 0.8e-3 < cost.seconds(4) < 1.6e-3


@pytest.mark.parametrize("trees", [True, False])
def test_a_feature_that_costs_nothing_does_not_lift_the_line(trees):
    rng = np.random.default_rng(3)
    cost = CostLine()
    for _ in range(300):
        rows = int(rng.integers(8, 72))
        cost.observe(rows, 0.4e-3 * rows * (1 + 0.1 * rng.standard_normal()), trees)
    for rows in (8, 40, 70):
        assert cost.seconds(rows, trees) == pytest.approx(0.4e-3 * rows, rel=0.2)


def test_a_file_of_steps_without_seconds_teaches_nothing():
    line = CostLine()
    line.recall({"products": [[[9.0, 9.0, 0.0]] * 3] * 2, "values": [[0.0] * 3] * 2})
    assert not line.known
