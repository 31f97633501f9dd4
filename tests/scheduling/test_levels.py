"""Levels run while they usually bring more than their pass costs."""

import numpy as np

from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.scheduling.levels import Levels

FREE = Worth()


def levels(*chances, count=1):
    """Of two nodes each, four children per level, of which two are worthless."""
    found = Levels((2, 2, 2), (4, 8, 12, 16))
    for _ in range(count):
        found.observe(scores(*chances))
    return found


def scores(*chances):
    """[2, 4 * levels]: requests with these and with half of these chances."""
    of_level = [[c, 0, c / 2, c / 4] for c in chances]
    with np.errstate(divide="ignore"):
        return np.log(np.outer([1, 0.5], np.ravel(of_level)))


def test_all_levels_run_while_nothing_is_known():
    assert Levels((2, 2, 2), (4, 8, 12, 16)).worth(Worth(0.1, 9, 9), 1, 1) == 3


def test_a_level_must_bring_more_than_its_rows_and_its_pass():
    # Chances of 0.9 * 1.5 * 0.75 in the mean, of 2 requests.
    found = levels(0.9, 0.4, 0.1, 0.1)
    assert found.worth(FREE, 2, 2) == 3
    gains = [0.9 * 1.5 * 1.5, 0.4 * 1.5 * 1.5, 0.1 * 1.5 * 1.5]
    for count, gain in enumerate(gains):
        assert found.worth(Worth(1, 0, gain * 0.99), 2, 2) == count + 1
        assert found.worth(Worth(1, 0, gain * 1.01), 2, 2) == count
        # Two rows of each of 4 requests, two of which are padding.
        assert found.worth(Worth(1, gain / 8 * 0.99), 2, 4) == count + 1
        assert found.worth(Worth(1, gain / 8 * 1.01), 2, 4) == count
    assert found.worth(Worth(-0.1), 2, 2) == 0
    assert found.worth(Worth(0.5, 0, gains[0] * 0.51), 2, 2) == 0


def test_levels_that_did_not_run_are_remembered_as_they_were():
    found = levels(0.9, 0.4, 0.1, 0.1)
    costs = Worth(1, 0, 0.3)
    assert found.worth(costs, 2, 2) == 2
    for _ in range(200):
        found.observe(scores(0.05))
    assert found.worth(costs, 2, 2) == 0
    for _ in range(200):
        found.observe(scores(0.9))
    assert found.worth(costs, 2, 2) == 2


def test_a_tree_without_levels_has_none():
    found = Levels((), (4,))
    found.observe(scores(0.9))
    assert found.worth(FREE, 1, 1) == 0
