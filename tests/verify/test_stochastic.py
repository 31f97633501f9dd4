"""The engine's stochastic rules against the reference, decision by decision."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_specinfer.tree.proposals import NO_DRAW, Draws, certain, joined, stacked
from vllm_specinfer.verify import reference
from vllm_specinfer.verify.stochastic import verify_draws

VOCAB = 7


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


def a_source(rng, num_draws, replaces):
    """The draws of one source below one node, and the same for the reference."""
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
        reference.Proposal(token, token, q) for token, q in zip(drawn, qs, strict=True)
    ]
    own = np.array([q.numpy()[tokens] for q in qs])
    return Draws(places[None], tokens[None], own[None]), proposals


def a_case(rng, sizes, replaces):
    """p [V] and what several sources, the last one certain, propose below one node."""
    p = rng.dirichlet(np.full(VOCAB, 0.4))
    sources = [a_source(rng, size, replaces) for size in sizes]
    if rng.random() < 0.5:
        token = int(rng.integers(VOCAB))
        whole = torch.nn.functional.one_hot(torch.tensor(token), VOCAB).double()
        sources.append((certain(token), [reference.Proposal(token, token, whole)]))
    return p, joined([s[0] for s in sources]), [p for s in sources for p in s[1]]


@pytest.mark.parametrize("replaces", [True, False], ids=["mss", "rrs"])
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(
        st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4
    ),
)
def test_every_request_of_a_batch_gets_the_references_decisions(replaces, seed, sizes):
    rng = np.random.default_rng(seed)
    cases = [a_case(rng, of_node, replaces) for of_node in sizes]
    draws = stacked([c[1] for c in cases])
    uniforms = rng.random(draws.places.shape)
    p = np.array([c[0] for c in cases])
    at_candidates = np.take_along_axis(p, draws.tokens, axis=1)
    places, left = verify_draws(at_candidates, draws, uniforms)
    for g, (p, _, proposals) in enumerate(cases):
        chance = Scripted(uniforms[g])
        token, child = reference.mss(torch.from_numpy(p), proposals, chance)
        if child is not None:
            assert draws.tokens[g, places[g]] == token
            continue
        assert places[g] == NO_DRAW
        known = draws.tokens[g] >= 0
        p[draws.tokens[g][known]] = left[g][known]
        assert p / p.sum() == pytest.approx(chance.weights.numpy(), abs=1e-9)


def test_a_target_equal_to_the_ssm_accepts_the_first_draw():
    q = np.array([[0.5, 0.25, 0.25]])
    draws = Draws(np.array([[2]]), np.array([[4, 1, 3]]), q[:, None])
    for u in (1e-9, 0.5, 1 - 1e-9):
        places, _ = verify_draws(q.copy(), draws, np.array([[u]]))
        assert places == [2]
