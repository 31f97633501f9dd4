"""The engine's stochastic rules against the reference, decision by decision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.tree.proposals import NO_DRAW, Draws, stacked
from vllm_specinfer.verify import reference
from vllm_specinfer.verify.stochastic import verify_draws

VOCAB = 7
RULES = {"mss": reference.mss, "rrs": reference.rrsw}


class Scripted:
    """Decisions from given uniform numbers; remembers the last weights to draw from."""

    def __init__(self, tests):
        self.tests, self.weights = list(tests), None

    def accept(self, probability):
        return self.tests.pop(0) < probability

    def choose(self, weights):
        if (weights == 1).all():  # which proposal is next: the order of drawing
            return 0
        self.weights = weights
        return 0


def a_case(rng, num_draws, replaces):
    """p [V], the draws of one node, and the same as proposals of the reference."""
    p = rng.dirichlet(np.full(VOCAB, 0.4))
    tokens = rng.permutation(VOCAB)[: rng.integers(2, VOCAB + 1)]
    q = rng.dirichlet(np.full(len(tokens), 0.6))
    if replaces:
        places = rng.choice(len(tokens), num_draws, p=q)
    else:
        num_draws = min(num_draws, (q > 0).sum())
        places = rng.choice(len(tokens), num_draws, replace=False, p=q)
    whole = torch.zeros(VOCAB, dtype=torch.float64)
    whole[torch.from_numpy(tokens)] = torch.from_numpy(q)
    drawn = tokens[places].tolist()
    qs = [whole] * len(drawn)
    if not replaces:
        qs = reference.without_replacement(whole, drawn)
    proposals = [
        reference.Proposal(token, child, q_)
        for child, (token, q_) in enumerate(zip(drawn, qs, strict=True))
    ]
    return p, Draws(places[None], tokens[None], q[None]), proposals


@pytest.mark.parametrize("rule", RULES)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
)
def test_every_request_of_a_batch_gets_the_references_decisions(rule, seed, sizes):
    rng = np.random.default_rng(seed)
    cases = [a_case(rng, size, rule == "mss") for size in sizes]
    draws = stacked([c[1] for c in cases])
    uniforms = rng.random(draws.places.shape)
    p = np.array([c[0] for c in cases])
    at_candidates = np.take_along_axis(p, draws.tokens, axis=1)
    places, left = verify_draws(at_candidates, draws, uniforms, rule == "mss")
    for g, (p, _, proposals) in enumerate(cases):
        chance = Scripted(uniforms[g])
        token, child = RULES[rule](torch.from_numpy(p), proposals, chance)
        if child is not None:
            assert draws.tokens[g, places[g]] == token
            continue
        assert places[g] == NO_DRAW
        known = draws.q[g] > 0
        p[draws.tokens[g][known]] = left[g][known]
        assert p / p.sum() == pytest.approx(chance.weights.numpy(), abs=1e-9)


def test_the_difference_between_the_rules_shows():
    """Fails if one rule were run as the other: independent draws tested as RRS."""
    rng = np.random.default_rng(0)
    differs = 0
    for _ in range(200):
        p, draws, _ = a_case(rng, 3, replaces=True)
        uniforms = rng.random((1, 3))
        p = p[None, draws.tokens[0]]
        mss, rrs = (verify_draws(p, draws, uniforms, r)[1] for r in (True, False))
        differs += not np.allclose(mss, rrs)
    assert differs > 10


def test_a_target_equal_to_the_ssm_accepts_the_first_draw():
    q = np.array([[0.5, 0.25, 0.25]])
    draws = Draws(np.array([[2, NO_DRAW]]), np.array([[4, 1, 3]]), q)
    for u in (1e-9, 0.5, 1 - 1e-9):
        places, _ = verify_draws(q.copy(), draws, np.array([[u, u]]), True)
        assert places == [2]
