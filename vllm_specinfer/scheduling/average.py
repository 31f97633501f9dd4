"""Running averages over requests."""

import numpy as np

# So many of them are remembered, and those of so many steps at least: a few steps of a
# full batch say little, as each request goes on with a text of its own.
MEMORY_REQS, MEMORY_STEPS = 50, 25
# What another engine has learned, maybe under another load, counts as so many: one
# round of tries changes it by half.
RECALLED_REQS = 8


class Average:
    """A running average over requests, plain until there are many."""

    def __init__(self, value: np.ndarray | None = None) -> None:
        """`value` is what another engine has learned, None for nothing."""
        self.value = value
        self._num_reqs = 0 if value is None else RECALLED_REQS

    def observe(self, mean: np.ndarray, num_reqs: int) -> None:
        """Take in the mean over so many requests."""
        if self.value is None:
            self.value = np.zeros_like(mean)
        weight = num_reqs / (num_reqs + self._num_reqs)
        self.value = self.value + weight * (mean - self.value)
        memory = max(MEMORY_REQS, MEMORY_STEPS * num_reqs)
        self._num_reqs = min(self._num_reqs + num_reqs, memory)

    def learned(self) -> list[float] | None:
        """As JSON has it."""
        return None if self.value is None else self.value.tolist()
