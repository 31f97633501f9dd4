"""How many nodes a step is worth: expected tokens per second, for the whole batch.

A node costs the target a row; it brings a token with the chance that it is accepted. A
level of the trees costs the SSMs a pass. The costs are learned from the steps' own
timings (`cost.py`), the chances come from the sources (`calibration.py`).

Dimension legend: R requests of a step, C candidates per request, N nodes per request.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from vllm_specinfer.scheduling.average import Average
from vllm_specinfer.scheduling.budget import Budget, Worth
from vllm_specinfer.scheduling.cost import CostLine
from vllm_specinfer.scheduling.exploration import TRIES, PlainSteps, Tries

# So many steps are remembered by the rate.
RATE_MEMORY = 10
# Whether drafting pays is not asked before so many drafts were timed: the first ones
# are slow, and a text's first tokens are the least likely ones.
LEAST_DRAFTS = 8
# Costs and chances are estimates, and what looks best was overestimated the most: nodes
# must pay even if only so much of what they promise comes true.
CAUTION = 0.9
# No node is asked for more than this chance; nothing is quite sure.
MOST_LEAST = 0.99
# Drafting that pays begins anew only where so many steps bring more than that costs.
PAYBACK_STEPS = 128
# After so many drafts without a level one has some, whatever they seem to cost, and so
# has every other try: by the rest of them it shows what a draft without levels costs.
FLAT_DRAFTS = 64
# Growing a tree of N nodes hardly ever takes an SSM more rows than this times N; more
# are those of a prompt, which is caught up with. What that costs per draft is averaged
# over so many.
ROWS_PER_NODE = 4
MEMORY_DRAFTS = 200


class LoadBudget(Budget):
    """Spends what raises the batch's expected tokens per second."""

    learns = True

    def __init__(
        self,
        num_nodes: int,
        sizes: Sequence[int] = (),
        agreed: Callable[[float], float] = float,
    ) -> None:
        """Nothing is known yet.

        Args:
            num_nodes: The most a request may get (N).
            sizes: What the rows of a step are padded to, ascending.
            agreed: What all ranks take for the seconds that each has measured.
        """
        self._num_nodes = num_nodes
        self._agreed = agreed
        self._step, self._draft = CostLine(sizes), CostLine(passes=True)
        # When drafted: [N] mean chance of a request's best, second best, ... node; the
        # SSMs' rows per request, and levels.
        self._profile, self._draft_size = Average(), Average()
        # [N] the same chances of lookups alone, where nobody sees the trees in time.
        self._known = Average()
        # Drafts that were timed.
        self._num_drafts = 0
        self._tokens_per_second = 0.0
        self._plain_steps, self._tries = PlainSteps(), Tries()
        # Seconds per request of a draft that go into prompts.
        self._prompts = 0.0
        # Drafts since one had levels.
        self._flat_drafts = 0
        # The next draft catches up with a pause.
        self._resumes = False
        # What a row of a long catch-up takes; None before the first one.
        self._row_seconds: float | None = None
        self._drafting = True

    def grows(self, num_reqs: int) -> bool:
        """Not now and then, to know what a plain step costs."""
        lost = partial(self._lost_without_trees, num_reqs)
        return not num_reqs or not self._plain_steps.begins(lost)

    def _lost_without_trees(self, num_reqs: int) -> float:
        """The part of its tokens that a step without trees loses."""
        if not (self._step.known and self._tokens_per_second):
            return 0.0
        plain = num_reqs / self._step.seconds(num_reqs)
        return 1 - plain / self._tokens_per_second

    def drafts(
        self,
        num_reqs: int,
        unread: int = 0,
        known: np.ndarray | None = None,
        most: int | None = None,
    ) -> bool:
        """Whether trees of the usual chances bring more than they cost."""
        if num_reqs:
            lost_steps = self._lost_steps(num_reqs, unread, known, most)
            if not lost_steps:
                self._tries.end()
            elif paused := self._tries.go_on(lost_steps):
                self._draft.fade(paused)
                self._resumes = True
            self._drafting = not lost_steps or self._tries.left is not None
        return self._drafting

    def _lost_steps(
        self, num_reqs: int, unread: int, known: np.ndarray | None, most: int | None
    ) -> float:
        """How many plain steps are lost by a try; none where drafting pays."""
        if not self._knows_trees or self._num_drafts < LEAST_DRAFTS:
            return 0.0
        rate = self._usual_rate(num_reqs, most)
        if known is None:
            rate_without = self._known_rate(num_reqs, most)
        else:
            tokens, seconds, _ = self._best_step(known)
            rate_without = tokens / (num_reqs * seconds)
        lost = 1 - max(rate, self._flat_rate(num_reqs)) / rate_without
        reading_steps = self._reading_seconds(unread) / self._step.seconds(num_reqs)
        if lost + reading_steps / PAYBACK_STEPS <= 0:
            return 0.0
        return TRIES * max(rate_without / rate - 1, 0) + reading_steps

    @property
    def _knows_trees(self) -> bool:
        """What trees cost and bring."""
        return self._profile.value is not None and self._step.known

    def _usual_rate(self, num_reqs: int, most: int | None) -> float:
        """Tokens per second and request of the best trees, where all of R are of the
        usual chances and drafts of the usual size, as a try's are."""
        chances = self._profile.value[:most].tolist()
        return self._best_rate(num_reqs, chances, self._draft_seconds(num_reqs))

    def _flat_rate(self, num_reqs: int) -> float:
        """The same of the best node alone: no level, the SSMs only read what is new."""
        chance = float(self._profile.value[0])
        reading = self._draft.seconds(num_reqs * (1 + chance))
        drafting = reading + num_reqs * self._prompts
        return self._best_rate(num_reqs, [chance], drafting)

    def _known_rate(self, num_reqs: int, most: int | None) -> float:
        """The same of lookups alone, without nodes where that is best."""
        plain = 1 / self._step.seconds(num_reqs)
        if self._known.value is None:
            return plain
        chances = self._known.value[:most].tolist()
        return max(plain, self._best_rate(num_reqs, chances, 0.0))

    def _best_rate(self, num_reqs: int, chances: list[float], drafting: float) -> float:
        rows = range(2 * num_reqs, (len(chances) + 2) * num_reqs, num_reqs)
        costs = self._tree_seconds(num_reqs, rows)
        return max(
            (1 + CAUTION * tokens) / (seconds + drafting)
            for tokens, seconds in zip(accumulate(chances), costs, strict=True)
        )

    def _tree_seconds(self, num_reqs: int, rows: Iterable[int]) -> list[float]:
        """What steps of R requests with trees take; no less than one without."""
        plain = self._step.seconds(num_reqs)
        return [max(seconds, plain) for seconds in self._step.seconds_of(rows, 1.0)]

    def _reading_seconds(self, rows: int) -> float:
        """What catching up with so many tokens costs."""
        row_seconds = self._row_seconds
        return rows * (self._draft.marginal(1) if row_seconds is None else row_seconds)

    def _draft_seconds(self, num_reqs: int, asks: bool = True) -> float:
        """What drafts of the usual size cost for R requests, if SSMs are asked."""
        if not asks:
            return 0.0
        prompts = num_reqs * self._prompts
        if self._draft_size.value is None:
            return prompts
        rows, levels = self._draft_size.value.tolist()
        return self._draft.seconds(num_reqs * rows, levels) + prompts

    def worth(self) -> Worth:
        """By recent chances and costs; a child costs the target a row."""
        if self._profile.value is None or not self._draft.known:
            return super().worth()
        rate, child = self._tokens_per_second, CAUTION * float(self._profile.value[0])
        if (self._tries.left or 0) % 2 or self._flat_drafts >= FLAT_DRAFTS:
            return Worth(child)  # to know what levels cost
        target = self._step.marginal(1) * rate
        return Worth(
            max(child - target, 0.0),
            self._draft.marginal(1) * rate,
            self._draft.marginal(0, 1) * rate,
            min(target / CAUTION, MOST_LEAST),
        )

    def nodes(self, chances: np.ndarray, most: int, asks: bool = True) -> np.ndarray:
        """As `least_score` would; where nothing is known of a request, the usual."""
        profile = self._profile if asks else self._known
        if profile.value is None or not self._step.known:
            return super().nodes(chances, most, asks)
        expected = np.where(np.isnan(chances), profile.value, chances)[:, :most]
        with np.errstate(divide="ignore"):
            scores = np.log(expected)
        *_, least = self._best_step(scores, self._draft_seconds(len(chances), asks))
        return (scores >= least).sum(axis=1)

    def observe_chances(
        self, scores: np.ndarray, num_nodes: np.ndarray, asks: bool = True
    ) -> None:
        """As `least_score`, which has seen the trees in time."""
        num_reqs, chances = len(scores), np.exp(scores)
        if asks:
            self._profile.observe(chances.sum(axis=0) / num_reqs, num_reqs)
        if self._step.known:
            has_row = np.arange(chances.shape[1]) < num_nodes[:, None]
            tokens = num_reqs + CAUTION * float(chances[has_row].sum())
            rows = num_reqs + int(num_nodes.sum())
            seconds = self._step.seconds(num_reqs)
            if rows > num_reqs:
                (seconds,) = self._tree_seconds(num_reqs, [rows])
            self._note_rate(tokens / (seconds + self._draft_seconds(num_reqs, asks)))

    def observe_known(self, scores: np.ndarray) -> None:
        """Averages by which `nodes` and `drafts` go."""
        self._known.observe(np.exp(scores).mean(axis=0), len(scores))

    def least_score(
        self, scores: np.ndarray, drafted: bool, most: int | None = None
    ) -> float:
        """The score of the last node that raises the expected tokens per second."""
        num_reqs = len(scores)
        if not num_reqs:
            return -np.inf
        most = self._num_nodes if most is None else most
        best = -np.sort(-scores, axis=1)[:, :most]
        if drafted:
            # What smaller trees do not show stays what it was.
            usual = self._profile.value
            mean = np.zeros(self._num_nodes) if usual is None else usual.copy()
            mean[:most] = 0.0
            mean[: best.shape[1]] = np.exp(best).sum(axis=0) / num_reqs
            self._profile.observe(mean, num_reqs)
        if not self._step.known:
            return -np.inf
        drafting = self._draft_seconds(num_reqs, drafted)
        tokens, seconds, least = self._best_step(best, drafting)
        self._note_rate(tokens / seconds)
        return least

    def _best_step(
        self, scores: np.ndarray, drafting: float = 0.0
    ) -> tuple[float, float, float]:
        """The best step for R requests that have these candidates.

        Args:
            scores: [R, C] log of the chances, -inf where there is no candidate.
            drafting: Seconds that drafting them takes, whatever becomes of them.

        Returns:
            The tokens that it is expected to bring, its seconds with drafting, and the
            score of its last node; infinity where no node is worth its row.
        """
        num_reqs = len(scores)
        tokens, seconds = float(num_reqs), self._step.seconds(num_reqs) + drafting
        best = tokens, seconds, np.inf
        found = sorted(scores[np.isfinite(scores)].tolist(), reverse=True)
        rows = range(num_reqs + 1, num_reqs + len(found) + 1)
        costs = self._tree_seconds(num_reqs, rows)
        pairs = pairwise([*found, -np.inf])
        for (score, following), cost in zip(pairs, costs, strict=True):
            tokens, seconds = tokens + CAUTION * math.exp(score), cost + drafting
            if score == following:
                continue  # what is equal is admitted together
            if tokens * best[1] > best[0] * seconds:
                best = tokens, seconds, score
        return best

    def _note_rate(self, rate: float) -> None:
        """Average what recent steps brought per second, their drafting included."""
        if not self._tokens_per_second:
            self._tokens_per_second = rate
        self._tokens_per_second += (rate - self._tokens_per_second) / RATE_MEMORY

    def start_from(self, passes: Mapping[int, tuple[float, float]]) -> None:
        """Before the first request: what passes take now, whatever was recalled.

        A pass of a level costs the SSMs as much as the pass that catches up.

        Args:
            passes: By rows: seconds of the target and of the SSMs, one after the other.
        """
        self._step.clear()
        self._draft.clear()
        for rows, (target, ssms) in passes.items():
            self._step.take_in(rows, target)
            for levels in (0, 1):
                count = 1 + levels
                self._draft.take_in(count * rows, count * ssms, levels)
        self._plain_steps.know_first()

    def observe_step(self, rows: int, seconds: float, trees: bool) -> None:
        """A target step without a prompt took so long, all but its drafting."""
        self._step.observe(rows, self._agreed(seconds), trees)

    def observe_draft(
        self,
        num_reqs: int,
        rows: int,
        levels: int,
        seconds: float,
        follows: bool = False,
    ) -> None:
        """A draft took so long for R requests and so many rows and levels."""
        seconds = self._agreed(seconds)
        reads = not follows and rows > num_reqs * ROWS_PER_NODE * (self._num_nodes + 1)
        if reads:
            self._row_seconds = seconds / rows
        resumes, self._resumes = self._resumes, False
        if resumes:
            return
        self._num_drafts += 1
        self._prompts += (reads * seconds / num_reqs - self._prompts) / MEMORY_DRAFTS
        if reads:
            return
        self._flat_drafts = 0 if levels else self._flat_drafts + 1
        self._draft_size.observe(np.array([rows / num_reqs, levels]), num_reqs)
        self._draft.observe(rows, seconds, levels)

    def observe_prompts(self, num_reqs: int, seconds: float) -> None:
        """What drafts cost besides; each of them makes it count a little less."""
        self._prompts += self._agreed(seconds) / num_reqs / MEMORY_DRAFTS

    def learned(self) -> dict[str, Any]:
        """Costs; what trees bring depends on texts and load."""
        return {"step": self._step.learned(), "draft": self._draft.learned()}

    def recall(self, learned: dict[str, Any]) -> None:
        """Start from another engine's costs, without plain first steps."""
        step, draft = copy.copy(self._step), copy.copy(self._draft)
        step.recall(learned["step"])
        draft.recall(learned["draft"])
        self._step, self._draft = step, draft
        if step.known:
            self._plain_steps.know_first()
