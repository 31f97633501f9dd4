"""How many nodes a step is worth: expected tokens per second, for the whole batch.

A node costs the target a row; it brings a token with the chance that it is accepted.
The cost is learned from the steps' own timings, the chances come from the sources
(`calibration.py`).

Dimension legend: R requests of a step, C candidates per request, N nodes per request.
"""

import numpy as np

# A line through few timings leans on this many rows for the cost of an empty step:
# 8 rows cost 1.26 times one row on a CPU, 16 rows 1.7 times, 32 rows 2.2 times.
PRIOR_ROWS = 25.0
PRIOR_WEIGHT = 0.1
FORGETTING = 0.98
# A timing that far above the line was a pause, unless it repeats.
PAUSE, MAX_PAUSES = 4.0, 5
# While drafting does not pay, every so many steps it is tried again; while it does, so
# often a step goes without, to know what that costs. So do the first steps of all.
TRY_AGAIN, FIRST_PLAIN_STEPS = 64, 3


class StepCost:
    """Seconds of a step, fitted to noisy recent timings.

    A line in its rows, and something on top where there are trees to be walked.
    """

    def __init__(self) -> None:
        # Weighted normal equations of the features 1, rows, trees.
        self._products = np.zeros((3, 3))
        self._values = np.zeros(3)
        self._pauses = 0

    @property
    def known(self) -> bool:
        """Something was observed."""
        return self._products[0, 0] > 0

    def observe(self, rows: int, seconds: float, trees: bool = False) -> None:
        """Take in one timing."""
        if self.known and seconds > PAUSE * self.seconds(rows, trees):
            self._pauses += 1
            if self._pauses < MAX_PAUSES:
                return
            self._products *= 0  # not a pause: the machine changed
            self._values *= 0
        self._pauses = 0
        features = np.array([1.0, rows, trees])
        self._products = FORGETTING * self._products + np.outer(features, features)
        self._values = FORGETTING * self._values + features * seconds

    def seconds(
        self, rows: np.ndarray | float, trees: np.ndarray | bool = False
    ) -> np.ndarray | float:
        """What steps of so many rows take; never falls with the rows."""
        products, values = self._products.copy(), self._values.copy()
        num, row_sum = products[0, :2]
        prior = values[0] / (row_sum + num * PRIOR_ROWS)  # seconds per row of its line
        for at in (1.0, 65.0):
            features = np.array([1.0, at, 0.0])
            products += PRIOR_WEIGHT * np.outer(features, features)
            values += PRIOR_WEIGHT * features * prior * (at + PRIOR_ROWS)
        products[2, 2] += PRIOR_WEIGHT  # trees cost nothing by themselves
        start, slope, walk = np.linalg.solve(products, values)
        line = max(start, 0.0) + max(slope, 0.0) * np.asarray(rows)
        return line + max(walk, 0.0) * np.asarray(trees)


class Budget:
    """Decides whether to draft, and which nodes are worth their rows."""

    def __init__(self, num_nodes: int) -> None:
        """`num_nodes` is the most a request may get (N)."""
        self._num_nodes = num_nodes
        self._step, self._draft = StepCost(), StepCost()
        # [N] mean chance of a request's best, second best, ... node, when drafted.
        self._profile: np.ndarray | None = None
        self._steps_to_plain = 1
        self._plain_steps = 0
        self._idle_steps = 0

    def observe_step(self, rows: int, seconds: float, trees: bool) -> None:
        """A target step without a prompt took so long, all but its drafting."""
        self._step.observe(rows, seconds, trees)

    def goes_plain(self) -> bool:
        """Whether this step is to go without any node, to know what that costs."""
        self._steps_to_plain -= 1
        if self._steps_to_plain > 0:
            return False
        self._plain_steps += 1
        first = self._plain_steps < FIRST_PLAIN_STEPS
        self._steps_to_plain = 2 if first else TRY_AGAIN
        return True

    def observe_draft(self, num_reqs: int, seconds: float) -> None:
        """Asking the SSMs for R requests took so long."""
        self._draft.observe(num_reqs, seconds)

    def drafts(self, num_reqs: int) -> bool:
        """Whether asking the SSMs for R requests pays."""
        if self._profile is None or not (self._step.known and self._draft.known):
            return True
        per_request = np.cumsum(self._profile)
        rows = num_reqs * np.arange(2, self._num_nodes + 2)
        seconds = self._step.seconds(rows, True) + self._draft.seconds(num_reqs)
        rate = ((1 + per_request) / seconds).max()
        self._idle_steps += 1
        if rate >= 1 / self._step.seconds(num_reqs):
            self._idle_steps = 0
            return True
        # Two steps in a row: the first one catches up with what the SSMs have missed.
        if self._idle_steps > TRY_AGAIN:
            self._idle_steps = 0
        return self._idle_steps in (0, TRY_AGAIN)

    def least_score(self, scores: np.ndarray, drafted: bool) -> float:
        """The score below which nodes cost more than they bring.

        Args:
            scores: [R, C] log of the chances; -inf where there is no candidate.
            drafted: The SSMs were asked.
        """
        num_reqs = len(scores)
        best = -np.sort(-scores, axis=1)[:, : self._num_nodes]
        if drafted:
            mean = np.zeros(self._num_nodes)
            mean[: best.shape[1]] = np.exp(best).mean(axis=0)
            if self._profile is None:
                self._profile = mean
            self._profile = FORGETTING * self._profile + (1 - FORGETTING) * mean
        if not self._step.known:
            return -np.inf
        best = -np.sort(-best[np.isfinite(best)])
        gained = np.concatenate([[0], np.cumsum(np.exp(best))])
        nodes = np.arange(len(gained))
        seconds = self._step.seconds(num_reqs + nodes, nodes > 0)
        worth = int(((num_reqs + gained) / seconds).argmax())
        return float(best[worth - 1]) if worth else np.inf
