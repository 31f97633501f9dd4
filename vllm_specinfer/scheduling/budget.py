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
PRIOR_WEIGHT = 0.5
FORGETTING = 0.98
# A timing that far above the line was a pause, unless it repeats.
PAUSE, MAX_PAUSES = 4.0, 5
# While drafting does not pay, every so many steps it is tried again.
TRY_AGAIN = 64


class LinearCost:
    """Seconds of a step as a line in its rows, fitted to noisy recent timings."""

    def __init__(self) -> None:
        # Weighted sums of 1, rows, rows^2, seconds, rows * seconds.
        self._sums = np.zeros(5)
        self._pauses = 0

    @property
    def known(self) -> bool:
        """Something was observed."""
        return self._sums[0] > 0

    def observe(self, rows: int, seconds: float) -> None:
        """Take in one timing."""
        if self.known and seconds > PAUSE * self.seconds(rows):
            self._pauses += 1
            if self._pauses < MAX_PAUSES:
                return
            self._sums *= 0  # not a pause: the machine changed
        self._pauses = 0
        new = np.array([1, rows, rows * rows, seconds, rows * seconds])
        self._sums = FORGETTING * self._sums + new

    def seconds(self, rows: np.ndarray | float) -> np.ndarray | float:
        """What steps of so many rows take; monotone and positive."""
        n, r, rr, t, rt = self._sums
        prior = t / (r + n * PRIOR_ROWS)  # seconds per row of the prior's line
        for at in (1.0, 65.0):
            w = PRIOR_WEIGHT
            n, r, rr = n + w, r + w * at, rr + w * at * at
            t = t + w * prior * (at + PRIOR_ROWS)
            rt = rt + w * prior * (at + PRIOR_ROWS) * at
        slope = max((n * rt - r * t) / (n * rr - r * r), 0.0)
        start = max((t - slope * r) / n, 0.0)
        return start + slope * np.asarray(rows)


class Budget:
    """Decides whether to draft, and which nodes are worth their rows."""

    def __init__(self, num_nodes: int) -> None:
        """`num_nodes` is the most a request may get (N)."""
        self._num_nodes = num_nodes
        self._step, self._draft = LinearCost(), LinearCost()
        # [N] mean chance of a request's best, second best, ... node, when drafted.
        self._profile: np.ndarray | None = None
        self._idle_steps = 0

    def observe_step(self, rows: int, seconds: float) -> None:
        """A target step without a prompt took so long, all but its drafting."""
        self._step.observe(rows, seconds)

    def observe_draft(self, num_reqs: int, seconds: float) -> None:
        """Asking the SSMs for R requests took so long."""
        self._draft.observe(num_reqs, seconds)

    def drafts(self, num_reqs: int) -> bool:
        """Whether asking the SSMs for R requests pays."""
        if self._profile is None or not (self._step.known and self._draft.known):
            return True
        per_request = np.concatenate([[0], np.cumsum(self._profile)])
        rows = num_reqs * np.arange(1, self._num_nodes + 2)
        seconds = self._step.seconds(rows) + self._draft.seconds(num_reqs)
        rate = ((1 + per_request) / seconds).max()
        self._idle_steps += 1
        if rate < 1 / self._step.seconds(num_reqs) and self._idle_steps < TRY_AGAIN:
            return False
        self._idle_steps = 0
        return True

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
        seconds = self._step.seconds(num_reqs + np.arange(len(gained)))
        worth = int(((num_reqs + gained) / seconds).argmax())
        return float(best[worth - 1]) if worth else np.inf
