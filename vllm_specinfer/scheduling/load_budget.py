"""How many nodes a step is worth: expected tokens per second, for the whole batch.

A node costs the target a row; it brings a token with the chance that it is accepted. A
level of the trees costs the SSMs a pass. The costs are learned from the steps' own
timings (`cost.py`), the chances come from the sources (`calibration.py`).

Dimension legend: R requests of a step, C candidates per request, N nodes per request.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from vllm_specinfer.scheduling.average import Average
from vllm_specinfer.scheduling.budget import Budget, Worth
from vllm_specinfer.scheduling.cost import CostLine, finite

# So many steps are remembered by the rate.
RATE_MEMORY = 10
# Whether drafting pays is not asked before so many drafts were timed: the first ones
# are slow, and a text's first tokens are the least likely ones. What another engine has
# learned is enough.
LEAST_DRAFTS = 8
# Costs and chances are estimates, and what looks best was overestimated the most: nodes
# must pay even if only so much of what they promise comes true.
CAUTION = 0.9
# No node is asked for more than this chance; nothing is quite sure.
MOST_LEAST = 0.99
# While drafting does not pay, it is tried again so often that this part of the time is
# lost by it, after a pause of so many steps at least and at most. Perhaps it seems not
# to pay because the machine was busy: at first pauses are shorter, each so many times
# as long as the one before, and tries go on while drafts take less than that part of
# what they should.
LOST_IN_TRIES = 0.004
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 4096
FIRST_PAUSE, LONGER = 64, 4
CHEAP = 0.5
# So many steps in a row: the first one catches up with what the SSMs have missed, and a
# few would hardly change what is usual, where another text has taught it.
TRIES = 8
# Drafting that pays begins anew only where so many steps bring more than that costs.
PAYBACK_STEPS = 128
# While it pays, now and then a step goes without, to know what that costs: so often
# that this part of the time is lost by it, after so many steps at least and at most. So
# do the first steps of all.
LOST_IN_PLAIN = 0.004
SHORTEST_RUN, LONGEST_RUN, FIRST_PLAIN_STEPS = 16, 256, 3
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
        # Drafts that were timed; those of other engines count less.
        self._num_drafts = 0.0
        self._tokens_per_second = 0.0
        self._steps_to_plain = 1
        self._plain_steps = 0
        # Seconds per request of a draft that go into prompts.
        self._prompts = 0.0
        # Since drafting paid or was tried, and tries that are left.
        self._idle_steps, self._tries = 0, 0
        # No pause is longer, but for what a try loses.
        self._patience = FIRST_PAUSE
        # Whether this step is a try, and drafts since one had levels.
        self._tried, self._flat_drafts = False, 0
        # The next draft catches up with a pause.
        self._resumes = False
        # What a row of a long catch-up takes; None before the first one.
        self._row_seconds: float | None = None
        self._drafting = True

    def grows(self, num_reqs: int) -> bool:
        """Not now and then, to know what a plain step costs."""
        if not num_reqs:
            return True
        self._steps_to_plain -= 1
        if self._steps_to_plain > 0:
            return True
        self._plain_steps += 1
        first = self._plain_steps < FIRST_PLAIN_STEPS
        self._steps_to_plain = 2 if first else self._steps_between_plain(num_reqs)
        return False

    def _steps_between_plain(self, num_reqs: int) -> int:
        """How many steps with trees pay for one without."""
        lost = 0.0
        if self._step.known and self._tokens_per_second:
            plain = num_reqs / self._step.seconds(num_reqs)
            lost = 1 - plain / self._tokens_per_second
        return int(min(max(lost / LOST_IN_PLAIN, SHORTEST_RUN), LONGEST_RUN))

    def drafts(
        self, num_reqs: int, unread: int = 0, known: np.ndarray | None = None
    ) -> bool:
        """Whether trees of the usual chances bring more than they cost."""
        if num_reqs:
            lost_steps = self._lost_steps(num_reqs, unread, known)
            if not lost_steps:
                self._idle_steps, self._tries, self._patience = 0, 0, FIRST_PAUSE
            self._tried = lost_steps > 0 and self._tries_again(lost_steps)
            self._drafting = self._tried or not lost_steps
        return self._drafting

    def _lost_steps(
        self, num_reqs: int, unread: int, known: np.ndarray | None
    ) -> float:
        """How many plain steps are lost by a try; none where drafting pays."""
        if not self._knows_trees or self._num_drafts < LEAST_DRAFTS:
            return 0.0
        rate, rate_without = self._usual_rate(num_reqs), self._known_rate(num_reqs)
        if known is not None:
            tokens, seconds, _ = self._best_step(known)
            rate_without = tokens / (num_reqs * seconds)
        lost = 1 - max(rate, self._flat_rate(num_reqs)) / rate_without
        reading_steps = self._reading_seconds(unread) / self._step.seconds(num_reqs)
        if lost + reading_steps / PAYBACK_STEPS <= 0:
            return 0.0
        return TRIES * max(rate_without / rate - 1, 0) + reading_steps

    def _tries_again(self, lost_steps: float) -> bool:
        """Whether a pause has been long enough, given what a try loses."""
        if not self._tries:
            self._idle_steps += 1
            pause = min(lost_steps / LOST_IN_TRIES, max(self._patience, lost_steps))
            pause = min(max(pause, SHORTEST_PAUSE), LONGEST_PAUSE)
            if self._idle_steps <= pause:
                return False
            self._draft.fade(self._idle_steps)
            self._patience *= LONGER
            self._idle_steps, self._tries, self._resumes = 0, TRIES, True
        self._tries -= 1
        return True

    @property
    def _knows_trees(self) -> bool:
        """What trees cost and bring."""
        return self._profile.value is not None and self._step.known

    def _usual_rate(self, num_reqs: int) -> float:
        """Tokens per second and request of the best trees, where all of R are of the
        usual chances and drafts of the usual size, as a try's are."""
        chances = self._profile.value.tolist()
        return self._best_rate(num_reqs, chances, self._draft_seconds(num_reqs))

    def _flat_rate(self, num_reqs: int) -> float:
        """The same of the best node alone: no level, the SSMs only read what is new."""
        chance = float(self._profile.value[0])
        reading = self._draft.seconds(num_reqs * (1 + chance))
        drafting = reading + num_reqs * self._prompts
        return self._best_rate(num_reqs, [chance], drafting)

    def _known_rate(self, num_reqs: int) -> float:
        """The same of lookups alone, without nodes where that is best."""
        plain = 1 / self._step.seconds(num_reqs)
        if self._known.value is None:
            return plain
        return max(plain, self._best_rate(num_reqs, self._known.value.tolist(), 0.0))

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
        if not asks or self._draft_size.value is None:
            return 0.0
        rows, levels = self._draft_size.value.tolist()
        usual = self._draft.seconds(num_reqs * rows, levels)
        return usual + num_reqs * self._prompts

    def worth(self) -> Worth:
        """By recent chances and costs; a child costs the target a row."""
        if self._profile.value is None or not self._draft.known:
            return super().worth()
        rate, child = self._tokens_per_second, CAUTION * float(self._profile.value[0])
        if (self._tried and self._tries % 2) or self._flat_drafts >= FLAT_DRAFTS:
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

    def least_score(self, scores: np.ndarray, drafted: bool) -> float:
        """The score of the last node that raises the expected tokens per second."""
        num_reqs = len(scores)
        if not num_reqs:
            return -np.inf
        best = -np.sort(-scores, axis=1)[:, : self._num_nodes]
        if drafted:
            mean = np.zeros(self._num_nodes)
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

    @property
    def knows_costs(self) -> bool:
        """Something was recalled or observed."""
        return self._step.known

    def start_from(self, rows: int, target: float, ssms: float) -> None:
        """A pass of a level costs the SSMs as much as the pass that catches up."""
        self._step.observe(rows, target)
        for levels in (0, 1):
            passes = 1 + levels
            self._draft.observe(passes * rows, passes * ssms, levels)
        self._know_plain_steps()

    def _know_plain_steps(self) -> None:
        """The first steps need not go without trees."""
        self._plain_steps, self._steps_to_plain = FIRST_PLAIN_STEPS, SHORTEST_RUN

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
        self._prompts += (reads * seconds / num_reqs - self._prompts) / MEMORY_DRAFTS
        if reads:
            return
        self._flat_drafts = 0 if levels else self._flat_drafts + 1
        if seconds < CHEAP * self._draft.seconds(rows, levels):
            self._flat_drafts = FLAT_DRAFTS
            if self._tried:
                self._tries = max(self._tries, 1)
        self._draft_size.observe(np.array([rows / num_reqs, levels]), num_reqs)
        self._draft.observe(rows, seconds, levels)
        self._num_drafts += 1

    def learned(self) -> dict[str, Any]:
        """Costs and averages."""
        return {
            "step": self._step.learned(),
            "draft": self._draft.learned(),
            "profile": self._profile.learned(),
            "draft_size": self._draft_size.learned(),
        }

    def recall(self, learned: dict[str, Any]) -> None:
        """Start from another engine's costs and averages, without plain first steps."""
        if learned["profile"] is None:
            return
        profile = finite(learned["profile"], (self._num_nodes,))
        size = learned["draft_size"]
        size = None if size is None else finite(size, (2,))
        step, draft = copy.copy(self._step), copy.copy(self._draft)
        step.recall(learned["step"])
        draft.recall(learned["draft"])
        self._step, self._draft = step, draft
        self._num_drafts = self._draft.num_timings
        self._profile, self._draft_size = Average(profile), Average(size)
        self._know_plain_steps()
