"""Gumbel-max draws: what the C++ kernel leaves out cannot win."""

import numpy as np
import pytest

from vllm_specinfer import noise
from vllm_specinfer.kernels.cpu import extension, gumbel


def draw(logits, seed, pos):
    """Winner and value, with the noise of every token."""
    values = logits + noise.gumbel_noise(seed, pos, np.arange(len(logits)))
    winner = int(values.argmax())
    return winner, float(values[winner])


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0, 8.0])
def test_no_token_that_is_left_out_would_win(monkeypatch, compiled, spread):
    if compiled:
        assert extension.load() is not None
    else:
        monkeypatch.setattr(extension, "load", lambda: None)
    rng = np.random.default_rng(int(10 * spread))
    ranks = set()
    for case in range(40):
        rows, size = 5, int(rng.integers(1, 3000))
        logits = (rng.standard_normal((rows, size)) * spread).astype(np.float32)
        logits[rng.random((rows, size)) < 0.2 * (case % 3)] = -np.inf
        logits[:, rng.integers(size)] = 0.0
        temperatures = rng.choice([0.5, 0.7, 1.0, 2.0], rows).astype(np.float32)
        seeds = rng.integers(-(1 << 63), 1 << 63, rows)
        positions = rng.integers(0, 1 << 31, rows)
        winners, values = gumbel.noised_argmax(logits, temperatures, seeds, positions)
        for i, row in enumerate(logits):
            token, value = draw(row / temperatures[i], int(seeds[i]), int(positions[i]))
            assert winners[i] == token
            assert values[i] == pytest.approx(value, abs=2e-6, rel=1e-6)
            ranks.add(int((row > row[token]).sum()))
    assert len(ranks) > 3  # not only the best ones


@pytest.mark.parametrize("compiled", [True, False])
def test_greedy_rows_and_rows_without_finite_or_with_huge_logits(monkeypatch, compiled):
    if not compiled:
        monkeypatch.setattr(extension, "load", lambda: None)
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 700)).astype(np.float32)
    logits[1] = -np.inf
    logits[2, [5, 9]] = np.nan
    logits[3, [300, 500]] = 40.0
    logits[4, [100, 200]] = 1e9  # too large for noise
    zeros = np.zeros(5, np.int64)
    winners, values = gumbel.noised_argmax(
        logits, np.array([0, 1, 1, 0, 1], np.float32), zeros, zeros
    )
    assert winners.tolist() == [logits[0].argmax(), 0, 5, 300, 100]
    assert values[[0, 1, 3, 4]].tolist() == [logits[0].max(), -np.inf, 40.0, 1e9]
    assert np.isnan(values[2])


def test_uniform_numbers_lie_in_the_middles_of_as_many_steps_as_a_float64_has():
    u = noise.uniform(-5, 1 << 40, np.arange(5000))
    steps = u * 2.0**53
    assert ((steps - 0.5 == np.floor(steps)) | (u >= 0.5)).all()
    assert (u > 0).all() and (u < 1).all() and len(set(u.tolist())) == len(u)
    assert abs(u.mean() - 0.5) < 0.02 and abs(u.var() - 1 / 12) < 0.005
