"""How many levels of trees to run where nobody looks at a level before the next one.

What a level brings follows from the chances of the nodes that it expands. The children
of the roots are known in every step, so what the first level would bring is, too; how
deep trees have been is where the rest is known from.

Dimension legend: L levels below the root, R requests, C candidates per request.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from vllm_specinfer.scheduling.average import Average
from vllm_specinfer.scheduling.budget import Worth


class Levels:
    """Levels that usually pay, of one SSM."""

    def __init__(self, sizes: Sequence[int], columns: Sequence[int]) -> None:
        """Nothing is known yet.

        Args:
            sizes: [L] most nodes of a request that each level expands.
            columns: [L + 1] candidates of a request once so many levels have run.
        """
        self._sizes, self._columns = sizes, columns
        self.forget()

    def forget(self) -> None:
        """Nothing is known."""
        # [L] sums of the chances of a request's nodes that each level expands.
        self._chances = Average()

    def worth(self, worth: Worth, num_reqs: int, num_padded: int) -> int:
        """How many levels pay, as far as is known.

        Args:
            worth: Of expanding nodes.
            num_reqs: R.
            num_padded: Requests whose rows a level has.
        """
        if self._chances.value is None:
            return len(self._sizes)
        known = zip(self._chances.value.tolist(), self._sizes, strict=True)
        for count, (chances, size) in enumerate(known):
            if not worth.pays(chances * num_reqs, size * num_padded):
                return count
        return len(self._sizes)

    def observe(self, scores: np.ndarray) -> None:
        """Take in the log chances [R, C] of a step's candidates."""
        if not self._sizes:
            return
        known = self._chances.value
        chances = np.zeros(len(self._sizes)) if known is None else known.copy()
        spans = pairwise((0, *self._columns))
        for level, ((first, end), size) in enumerate(
            zip(spans, self._sizes, strict=False)
        ):
            if end > scores.shape[1]:
                break
            best = np.sort(scores[:, first:end], axis=1)[:, -size:]
            chances[level] = np.exp(best).sum() / len(scores)
        self._chances.observe(chances, len(scores))
