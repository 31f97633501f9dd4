"""Chances of a source are corrected until they say how often it is right."""

import numpy as np
import pytest

from vllm_specinfer.scheduling.calibration import Calibration


@pytest.mark.parametrize(
    "right", [lambda p: 0.3 * p, lambda p: p, lambda p: p**0.5, lambda p: 0 * p]
)
def test_expected_and_accepted_nodes_become_equal(right):
    rng = np.random.default_rng(0)
    calibration = Calibration()
    expected = accepted = 0.0
    for n in range(3000):
        own = rng.uniform(0.05, 0.95, 4)
        chances = np.exp(calibration.corrected(np.log(own)))
        hits = int((rng.random(4) < right(own)).sum())
        calibration.observe(float(chances.sum()), hits)
        if n >= 1000:
            expected, accepted = expected + chances.sum(), accepted + hits
    assert expected == pytest.approx(accepted, rel=0.05, abs=40)


def test_corrected_chances_keep_their_order_and_never_pass_one():
    own = np.log(np.array([0.05, 0.5, 0.9, 0.999, 1.0]))
    for expected in (9.0, 0.0):  # far too much, far too little
        calibration = Calibration()
        for _ in range(100):
            calibration.observe(expected + 0.1, 3)
        chances = calibration.corrected(own)
        assert (np.diff(chances) > 0).all() and chances[-1] <= 0
        assert (chances != own)[:-1].all()


def test_a_source_that_is_always_wrong_is_disbelieved_within_fifty_steps():
    calibration = Calibration()
    for _ in range(50):
        chance = np.exp(calibration.corrected(np.log(0.9)))
        calibration.observe(float(chance), 0)
    assert np.exp(calibration.corrected(np.log(0.9))) < 0.25


def test_steps_without_tested_nodes_teach_nothing():
    calibration = Calibration()
    calibration.observe(0.0, 0)
    assert calibration.corrected(np.log(0.5)) == np.log(0.5)
