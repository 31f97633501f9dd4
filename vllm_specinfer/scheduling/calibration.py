"""How far a source's own chances can be believed."""

import numpy as np

from vllm_specinfer.tree.candidates import Candidates

FORGETTING = 0.98
# So many nodes, expected and accepted, are taken for granted at the start.
PRIOR_NODES = 4.0
_NEARLY_SURE = np.log(0.999)


class Calibration:
    """Nodes accepted over nodes expected, of one source, by recent steps."""

    def __init__(self) -> None:
        self._expected = self._accepted = PRIOR_NODES

    @property
    def log_factor(self) -> float:
        """Log of what a chance is to be multiplied by; never -inf."""
        return float(np.log(max(self._accepted, 1e-3) / self._expected))

    def observe(self, expected: float, accepted: int) -> None:
        """Verified nodes with these chances in all, and how many were accepted."""
        if expected:
            self._expected = FORGETTING * self._expected + expected
            self._accepted = FORGETTING * self._accepted + accepted

    def applied(self, candidates: Candidates) -> Candidates:
        """The candidates with corrected scores."""
        scores = np.minimum(candidates.scores + self.log_factor, _NEARLY_SURE)
        return Candidates(
            candidates.tokens, candidates.parents, scores.astype(np.float32)
        )
