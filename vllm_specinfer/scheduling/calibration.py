"""How far a source's own chances can be believed."""

import math

import numpy as np

# Steps of the correction: large at the start, then as small as this.
_LEAST_RATE, _FIRST_STEPS = 0.03, 10
_MOST_TRUST, _LEAST_TRUST = -1.5, 8.0
# Per step without a test. While a source is wrong, that brings a test now and then.
_FORGIVEN = 1e-4


class Calibration:
    """Corrects the chance that a node is accepted where its parent was.

    A source that promises too much has its chances multiplied by exp(-distrust). One
    that promises too little, as SSMs do to greedy requests, has them raised to the
    power exp(distrust), distrust being negative: what is sure stays sure. The distrust
    is what makes recently expected and accepted nodes equal. Where a source is believed
    so little that none of its nodes is tested, it is forgiven little by little: else it
    would be silent for good, whatever made it wrong.
    """

    def __init__(self) -> None:
        self.distrust = 0.0
        self._num_steps = 0
        # Since the last step.
        self._tested = False

    @property
    def line(self) -> tuple[float, float]:
        """A factor and what is taken off: what corrects the logs of chances."""
        if self.distrust < 0:
            return math.exp(self.distrust), 0.0
        return 1.0, self.distrust

    def corrected(self, logs: np.ndarray) -> np.ndarray:
        """Logs of what remains of a source's own chances, given as logs."""
        factor, distrust = self.line
        return logs * factor - distrust

    def observe(self, expected: float, accepted: int) -> None:
        """Tested nodes with these corrected chances in all, and how many were right."""
        if expected:
            rate = max(_LEAST_RATE, 2 / (_FIRST_STEPS + self._num_steps))
            self._num_steps += 1
            self._tested = True
            self.recall(self.distrust + rate * (expected - accepted))

    def forgive(self) -> None:
        """A step begins; where none of the last one's nodes was tested, hope."""
        if not self._tested and self.distrust > 0:
            self.distrust = max(self.distrust - _FORGIVEN, 0.0)
        self._tested = False

    def recall(self, distrust: float) -> None:
        """Go on with this one, as far as anything could have led to it."""
        self.distrust = min(max(distrust, _MOST_TRUST), _LEAST_TRUST)
