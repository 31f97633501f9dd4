"""Running averages over requests."""

import numpy as np

# So many of them are remembered, and those of so many steps at least: a few steps of a
# full batch say little, as each request goes on with a text of its own.
MEMORY_REQS, MEMORY_STEPS = 50, 25


class Average:
    """A running average over requests, plain until there are many."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.value: np.ndarray | None = None
        self._num_reqs = 0

    def observe(self, mean: np.ndarray, num_reqs: int) -> None:
        """Take in the mean over so many requests."""
        if self.value is None:
            self.value = np.zeros_like(mean)
        weight = num_reqs / (num_reqs + self._num_reqs)
        self.value = self.value + weight * (mean - self.value)
        memory = max(MEMORY_REQS, MEMORY_STEPS * num_reqs)
        self._num_reqs = min(self._num_reqs + num_reqs, memory)
