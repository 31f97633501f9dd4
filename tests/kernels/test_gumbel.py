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
    winners = set()
    for pos in range(200):
        size = int(rng.integers(1, 3000))
        logits = (rng.standard_normal(size) * spread).astype(np.float32)
        logits[rng.random(size) < 0.2 * (pos % 3)] = -np.inf
        logits[rng.integers(size)] = 0.0
        seed = int(rng.integers(-(1 << 63), 1 << 63))
        found = gumbel.noised_argmax(logits, seed, pos)
        assert found == draw(logits, seed, pos)
        winners.add(int((logits > logits[found[0]]).sum()))
    assert len(winners) > 3  # ranks: not only the best ones


def test_the_kernel_keeps_few_of_many_tokens():
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal(50_000) * 3).astype(np.float32)
    kept = [
        len(
            extension.load().gumbel_contenders(
                logits, float(logits.max()), gumbel.MAX_NOISE_FP32, prefix
            )
        )
        for prefix in range(1, 50)
    ]
    # On average as many as e^(logit - bound) sums up to, and the chords' 6% more.
    expected = np.exp(logits - logits.max()).sum()
    assert expected / 2 < np.mean(kept) < 2 * expected
