import numpy as np
import pytest

from vllm_specinfer.scheduling.request_chances import WEIGHT, RequestChances


def test_chances_are_averages_of_a_requests_own_trees():
    chances = RequestChances(4, 2)
    first, second = np.log([[0.8, 0.4], [0.6, 0.3]]), np.array([[-np.inf] * 2])
    chances.observe(np.array([3, 1]), first)
    chances.observe(np.array([3]), second)
    found = chances.of(np.array([1, 3, 0]))
    assert found[:2] == pytest.approx(
        np.array([[0.6, 0.3], [0.8 * (1 - WEIGHT), 0.4 * (1 - WEIGHT)]])
    )
    assert np.isnan(found[2]).all()
    # Without a node for long, none is left.
    for _ in range(20):
        chances.observe(np.array([3]), second)
    assert not chances.of(np.array([3])).any()
    chances.start(1)
    assert np.isnan(chances.of(np.array([1]))).all()
