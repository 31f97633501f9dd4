"""What a step costs: seconds as a line in its rows, from noisy timings."""

import numpy as np

# A line through few timings leans on this many rows for the cost of an empty step:
# 8 rows cost 1.26 times one row on a CPU, 16 rows 1.7 times, 32 rows 2.2 times.
PRIOR_ROWS = 25.0
PRIOR_WEIGHT = 0.1
FORGETTING = 0.98
# What another engine has learned counts as so many timings.
RECALLED_STEPS = 10.0
# So many timings hardly move a line through more than that.
NEW_TIMINGS, MANY_TIMINGS = 4, 20
# A timing that far above the line was a pause, unless it repeats.
PAUSE, MAX_PAUSES = 4.0, 5


class CostLine:
    """Seconds = start + rows x slope + extra x something, fitted to recent timings.

    The extra is whatever else costs time: 1 for the walk of a step with trees, the
    levels of a draft.
    """

    def __init__(self) -> None:
        # Weighted normal equations of the features 1, rows, extra.
        self._products = np.zeros((3, 3))
        self._values = np.zeros(3)
        self._pauses = 0
        # The line, and how many timings it lacks.
        self._solved: np.ndarray | None = None
        self._num_new = 0

    @property
    def known(self) -> bool:
        """Something was observed."""
        return self.num_timings > 0

    @property
    def num_timings(self) -> float:
        """How many timings the line is drawn through; old ones count for less."""
        return float(self._products[0, 0])

    def observe(self, rows: int, seconds: float, extra: float = 0.0) -> None:
        """Take in one timing."""
        if self.known and seconds > PAUSE * self.seconds(rows, extra):
            self._pauses += 1
            if self._pauses < MAX_PAUSES:
                return
            self._products *= 0  # not a pause: the machine changed
            self._values *= 0
        self._pauses = 0
        features = np.array([1.0, rows, extra])
        self._products = FORGETTING * self._products + np.outer(features, features)
        self._values = FORGETTING * self._values + features * seconds
        self._num_new += 1
        if self.num_timings < MANY_TIMINGS or self._num_new >= NEW_TIMINGS:
            self._solved = None

    def seconds(
        self, rows: np.ndarray | float, extra: np.ndarray | float = 0.0
    ) -> np.ndarray | float:
        """What so many rows take; never falls with them."""
        start, slope, more = self._coefficients()
        return start + slope * np.asarray(rows) + more * np.asarray(extra)

    def marginal(self, rows: float, extra: float = 0.0) -> float:
        """What they add to a step that happens anyway."""
        _, slope, more = self._coefficients()
        return float(slope * rows + more * extra)

    def learned(self) -> dict[str, list]:
        """What `recall` takes, as JSON has it."""
        return {"products": self._products.tolist(), "values": self._values.tolist()}

    def recall(self, learned: dict[str, list]) -> None:
        """Start from what another engine has learned, with little weight.

        Raises:
            ValueError: This is not what `learned` returns.
        """
        products = finite(learned["products"], (3, 3))
        values = finite(learned["values"], (3,))
        if products[0, 0] > 0:
            weight = min(1.0, RECALLED_STEPS / products[0, 0])
            self._products, self._values = weight * products, weight * values
            self._solved = None

    def _coefficients(self) -> np.ndarray:
        """[3] of the features, none negative; 0 while nothing is known."""
        if not self.known:
            return np.zeros(3)
        if self._solved is None:
            products, values = self._products.copy(), self._values.copy()
            num, row_sum = products[0, :2]
            prior = values[0] / (row_sum + num * PRIOR_ROWS)  # seconds per row
            for at in (1.0, 65.0):
                features = np.array([1.0, at, 0.0])
                products += PRIOR_WEIGHT * np.outer(features, features)
                values += PRIOR_WEIGHT * features * prior * (at + PRIOR_ROWS)
            products[2, 2] += PRIOR_WEIGHT  # the extra costs nothing by itself
            self._solved, self._num_new = _non_negative(products, values), 0
        return self._solved


def finite(numbers: list, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a file as an array; raises ValueError where they cannot be that."""
    array = np.array(numbers, float)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(
            f"what was learned must be {list(shape)} numbers; got {numbers}"
        )
    return array


def _non_negative(products: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Least squares from normal equations; features that would be negative are 0."""
    solution, used = np.zeros(len(values)), np.arange(len(values))
    while len(used):
        found = np.linalg.solve(products[np.ix_(used, used)], values[used])
        if (found >= 0).all():
            solution[used] = found
            break
        used = np.delete(used, found.argmin())
    return solution
