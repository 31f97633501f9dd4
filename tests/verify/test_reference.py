"""The reference rules, by exact enumeration of all draws and all decisions."""

import itertools

import pytest
import torch

from vllm_specinfer.verify import reference
from vllm_specinfer.verify.reference import Proposal, without_replacement

V = 4
EXACT = 1e-9


class Enumerated:
    """Replays one sequence of decisions; notes the alternatives it passed."""

    def __init__(self, decisions):
        self.decisions, self.at, self.probability = decisions, 0, 1.0
        self.pending = []

    def accept(self, probability):
        weights = torch.tensor([1 - probability, probability], dtype=torch.double)
        return self.choose(weights) == 1

    def choose(self, weights):
        weights = weights.double() / weights.double().sum()
        options = [i for i, w in enumerate(weights.tolist()) if w > 0]
        if self.at == len(self.decisions):
            for option in options[1:]:
                self.pending.append([*self.decisions, option])
            self.decisions = [*self.decisions, options[0]]
        choice = self.decisions[self.at]
        self.at += 1
        self.probability *= float(weights[choice])
        return choice


def outcomes(function):
    """Every result of function(chance) with its probability."""
    found, pending = {}, [[]]
    while pending:
        chance = Enumerated(pending.pop())
        result = function(chance)
        pending += chance.pending
        found[result] = found.get(result, 0.0) + chance.probability
    assert sum(found.values()) == pytest.approx(1, abs=1e-9)
    return found


def random_distribution(generator, zeros=False):
    weights = torch.rand(V, generator=generator, dtype=torch.double) ** 2
    if zeros:
        weights[int(torch.randint(V, (), generator=generator))] = 0
    return weights / weights.sum()


def cases(count=25):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        p = random_distribution(generator, zeros=i % 5 == 1)
        yield p, [random_distribution(generator, zeros=i % 5 == 2) for _ in range(3)]


def independent(qs):
    """A drawing scheme: one draw from each q."""

    def draw(chance):
        return [Proposal(t := chance.choose(q), t, q) for q in qs]

    return draw


def distinct(q, count):
    """A drawing scheme: distinct tokens of one q, each with what was left of it."""

    def draw(chance):
        tokens, left = [], q
        for _ in range(min(count, int((q > 0).sum()))):
            tokens.append(chance.choose(left))
            left = left.clone()
            left[tokens[-1]] = 0
        each = without_replacement(q, tokens)
        return [Proposal(t, t, d) for t, d in zip(tokens, each, strict=True)]

    return draw


def one_token(rule, p, draw):
    """(distribution of the emitted token [V], probability that no child is taken)."""
    found = outcomes(lambda chance: rule(p, draw(chance), chance))
    emitted = torch.zeros(V, dtype=torch.double)
    rejected = 0.0
    for (token, child), probability in found.items():
        emitted[token] += probability
        rejected += probability * (child is None)
    return emitted, rejected


def worst(rule, drawing):
    """Largest total variation to p over the cases."""
    return max(
        0.5 * float((one_token(rule, p, drawing(qs))[0] - p).abs().sum())
        for p, qs in cases()
    )


def keep_all(qs):
    return independent([qs[0]] * 3)


def two_sources(qs):
    return independent([qs[0], qs[1], qs[1]])


def gumbel_top_k(qs):
    return distinct(qs[0], 3)


EXACT_RULES = [
    (reference.mss, keep_all),
    (reference.mss, two_sources),
    (reference.rrsw, gumbel_top_k),
    (reference.rrsw, two_sources),
    (reference.naive, keep_all),
    (reference.naive, gumbel_top_k),
]


@pytest.mark.parametrize(
    ("rule", "drawing"), EXACT_RULES, ids=lambda f: getattr(f, "__name__", None)
)
def test_the_emitted_token_is_the_targets(rule, drawing):
    assert worst(rule, drawing) < EXACT


def without_duplicates(drawing):
    def changed(qs):
        def draw(chance):
            kept = {s.token: s for s in reversed(drawing(qs)(chance))}
            return list(kept.values())[::-1]

        return draw

    return changed


def without_update(qs):
    def draw(chance):
        return [Proposal(s.token, s.child, qs[0]) for s in gumbel_top_k(qs)(chance)]

    return draw


def top_tokens_with_softmax(qs):
    return lambda chance: [
        Proposal(t, t, qs[0]) for t in qs[0].topk(3).indices.tolist() if qs[0][t] > 0
    ]


WRONG_RULES = [
    (reference.mss, without_duplicates(keep_all)),
    (reference.mss, without_duplicates(two_sources)),
    (reference.rrsw, without_update),
    (reference.mss, top_tokens_with_softmax),
]


@pytest.mark.parametrize(("rule", "drawing"), WRONG_RULES)
def test_the_silent_errors_are_seen(rule, drawing):
    assert worst(rule, drawing) > 0.01


def point_masses(qs):
    return lambda chance: [
        Proposal(t, t, torch.eye(V, dtype=torch.double)[t])
        for t in qs[0].topk(3).indices.tolist()
    ]


def test_top_tokens_as_point_masses_are_exact_and_no_better_than_naive():
    for p, qs in cases():
        emitted, rejected = one_token(reference.mss, p, point_masses(qs))
        _, naive = one_token(reference.naive, p, point_masses(qs))
        torch.testing.assert_close(emitted, p, atol=EXACT, rtol=0)
        assert rejected == pytest.approx(naive, abs=EXACT)


@pytest.mark.parametrize(
    ("rule", "drawing"), EXACT_RULES[:3], ids=lambda f: getattr(f, "__name__", None)
)
def test_rejection_is_at_most_that_of_naive_sampling(rule, drawing):
    """Theorem 4.3, over the same draws."""
    gains = []
    for p, qs in cases():
        _, rejected = one_token(rule, p, drawing(qs))
        _, naive = one_token(reference.naive, p, drawing(qs))
        assert rejected <= naive + EXACT
        gains.append(naive - rejected)
    assert max(gains) > 0.05


def test_a_whole_tree_gives_the_targets_sequences():
    """Theorem 4.2 for two levels: the joint of the first two tokens."""
    generator = torch.Generator().manual_seed(1)
    p = {t: random_distribution(generator) for t in (None, *range(V))}
    q = {t: random_distribution(generator) for t in (None, *range(V))}

    class Drawn(dict):
        """Proposals drawn when a node is reached: all others do not matter."""

        def get(self, node, default):
            if node is not None and node >= V:
                return default
            drawn = independent([q[node]] * 2)(self["chance"])
            first = 0 if node is None else V * (node + 1)
            return [Proposal(s.token, first + s.token, s.q) for s in drawn]

    def step(chance):
        leaves = {n: p[0] for n in range(V, V + V * V)}
        drawn = Drawn(chance=chance)
        emitted = reference.verify(reference.mss, {**p, **leaves}, drawn, chance)
        if len(emitted) == 1:
            # The step ended: the next one starts with a fresh draw from the target.
            emitted.append(chance.choose(p[emitted[0]]))
        return tuple(emitted[:2])

    joint = outcomes(step)
    for first, second in itertools.product(range(V), repeat=2):
        wanted = float(p[None][first] * p[first][second])
        assert joint.get((first, second), 0) == pytest.approx(wanted, abs=1e-9)


def test_greedy_follows_the_best_token():
    p = torch.tensor([0.1, 0.4, 0.4, 0.1])
    q = torch.full((V,), 0.25)
    proposals = [Proposal(2, 7, q), Proposal(1, 8, q)]
    assert reference.greedy(p, proposals, Enumerated([])) == (1, 8)
    assert reference.greedy(p, proposals[:1], Enumerated([])) == (1, None)
