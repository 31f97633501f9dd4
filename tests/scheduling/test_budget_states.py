"""Whatever a budget has seen, it decides, and forgets nothing in a file."""

import json

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_specinfer.scheduling.exploration import (
    FIRST_PLAIN_STEPS,
    LONGEST_PAUSE,
    SHORTEST_RUN,
    TRIES,
)
from vllm_specinfer.scheduling.load_budget import LEAST_DRAFTS, LoadBudget

NODES = 6
seconds = st.floats(1e-6, 1e4)
num_reqs = st.integers(1, 40)


def some_scores(seed: int, requests: int, candidates: int) -> np.ndarray:
    """[requests, candidates] logs of chances, some of them missing."""
    rng = np.random.default_rng(seed)
    scores = np.log(rng.uniform(1e-6, 1, (requests, candidates)))
    scores[rng.random(scores.shape) < 0.3] = -np.inf
    return scores


class Budgets(RuleBasedStateMachine):
    """Timings, questions and restarts in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = LoadBudget(NODES)

    @rule(rows=st.integers(1, 300), seconds=seconds, trees=st.booleans())
    def a_step_took(self, rows, seconds, trees):
        self.budget.observe_step(rows, seconds, trees)

    @rule(
        num_reqs=num_reqs, rows=st.integers(1, 9), levels=st.integers(0, 5), s=seconds
    )
    def drafting_took(self, num_reqs, rows, levels, s):
        self.budget.observe_draft(num_reqs, num_reqs * rows, levels, s)

    @rule(num_reqs=st.integers(0, 40))
    def ask(self, num_reqs):
        assert self.budget.grows(num_reqs) in (True, False)
        assert self.budget.drafts(num_reqs) in (True, False)

    @rule(
        seed=st.integers(0, 1 << 32),
        num_reqs=st.integers(0, 9),
        candidates=st.integers(0, 12),
        drafted=st.booleans(),
    )
    def admit(self, seed, num_reqs, candidates, drafted):
        scores = some_scores(seed, num_reqs, candidates)
        least = self.budget.least_score(scores, drafted)
        assert not np.isnan(least)
        # It is the score of a candidate, or all or none are admitted.
        assert np.isinf(least) or least in scores
        if self.budget._step.known and num_reqs:
            admitted = np.exp(-np.sort(-scores, axis=1)[:, :NODES])
            admitted = admitted[admitted >= np.exp(least)]
            drafting = self.budget._draft_seconds(num_reqs) if drafted else 0.0
            plain = self.budget._step.seconds(num_reqs)
            rows = num_reqs + len(admitted)
            # Trees take no time off a step.
            seconds = max(plain, self.budget._step.seconds(rows, 1.0))
            assert plain > 0
            rate = (num_reqs + admitted.sum()) / (seconds + drafting)
            nothing = num_reqs / (plain + drafting)
            if len(admitted):
                assert rate >= nothing * (1 - 1e-9), "nothing would bring more"

    @rule(seed=st.integers(0, 1 << 32), frontier=st.integers(0, 9))
    def expand(self, seed, frontier):
        scores = some_scores(seed, 1, frontier)[0]
        found = self.budget.worth().expands(scores)
        assert found.shape == (frontier,) and found.dtype == bool
        # Never one node and not a likelier one.
        assert not found.any() or found[scores >= scores[found].min()].all()

    @rule()
    def restart(self):
        learned = json.loads(json.dumps(self.budget.learned()))
        budget = LoadBudget(NODES)
        budget.recall(learned)
        again = budget.learned()
        for name in ("step", "draft"):
            # With less weight, the same costs.
            ours, theirs = (
                sum(products[0][0] for products in state[name]["products"])
                for state in (again, learned)
            )
            weight = ours / theirs if theirs else 1
            assert weight <= 1
            for of in ("products", "values"):
                np.testing.assert_allclose(
                    again[name][of], weight * np.array(learned[name][of])
                )
        # A second restart changes nothing more, but for rounding.
        budget.recall(again)
        for name, state in budget.learned().items():
            for of in ("products", "values"):
                np.testing.assert_allclose(state[of], again[name][of], rtol=1e-12)
        self.budget = budget

    @invariant()
    def all_that_is_known_is_a_number(self):
        learned = self.budget.learned()
        averages = (self.budget._draft_size.value, self.budget._profile.value)
        numbers = [average for average in averages if average is not None]
        for line in learned.values():
            numbers += [line["values"], *line["products"]]
        assert all(np.isfinite(of).all() for of in numbers)


class DearDrafts(RuleBasedStateMachine):
    """An SSM that costs thousands of steps, whatever its nodes promise."""

    @initialize(start=st.floats(1e-4, 1e-1), slope=st.floats(0, 1e-3))
    def begin(self, start, slope):
        self.budget = LoadBudget(NODES)
        self.start, self.slope = start, slope
        for num_reqs in range(1, LEAST_DRAFTS + 2):
            self.run(num_reqs, seed=num_reqs, drafted=True)
        self.answers = []

    def run(self, num_reqs, seed, drafted):
        if drafted:
            levels = seed % 5 + 1
            rows = 2 * levels * num_reqs
            self.budget.observe_draft(num_reqs, rows, levels, 5e3 * self.start * rows)
        scores = some_scores(seed, num_reqs, 9)
        least = self.budget.least_score(scores, drafted)
        rows = num_reqs + np.count_nonzero(scores >= least)
        self.budget.observe_step(rows, self.start + self.slope * rows, rows > num_reqs)

    @rule(num_reqs=num_reqs, steps=st.integers(1, 100), seed=st.integers(0, 99))
    def steps(self, num_reqs, steps, seed):
        for step in range(steps):
            self.budget.grows(num_reqs)
            self.answers.append(self.budget.drafts(num_reqs))
            self.run(num_reqs, seed + step, self.answers[-1])

    @invariant()
    def they_are_hardly_ever_asked_for(self):
        asked = np.flatnonzero(getattr(self, "answers", []))
        # What they cost is out of all proportion: pauses are the longest at once.
        pairs = len(self.answers) // (LONGEST_PAUSE + 1) + 1 if len(asked) else 0
        assert len(asked) <= TRIES * pairs
        if len(self.answers) >= 20 and not any(self.answers[-20:]):
            assert not self.budget.worth().expands(np.zeros(4)).any()


def test_a_restarted_budget_knows_what_a_plain_step_costs():
    old, new = LoadBudget(NODES), LoadBudget(NODES)
    old.observe_step(1, 1e-3, False)
    old.observe_draft(1, 4, 3, 1e-3)
    old.least_score(np.log(np.full((1, NODES), 0.9)), drafted=True)
    new.recall(old.learned())
    assert all(new.grows(1) for _ in range(SHORTEST_RUN - FIRST_PLAIN_STEPS))


TestBudgets, TestDearDrafts = Budgets.TestCase, DearDrafts.TestCase
TestBudgets.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestDearDrafts.settings = settings(
    max_examples=15, stateful_step_count=8, deadline=None
)
