"""What a step costs: seconds as a line in its rows, from noisy timings."""

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

# A line through few timings leans on this many rows for the cost of an empty step:
# 8 rows cost 1.26 times one row on a CPU, 16 rows 1.7 times, 32 rows 2.2 times. Where
# rows cost twice that, the timings of a few steps must tell.
PRIOR_ROWS = 25.0
PRIOR_WEIGHT, EXTRA_WEIGHT = 0.01, 0.3
# What timings count for after one with an extra, if they had one, too, or neither had;
# and after others. What is rare is remembered for longer.
FORGETTING, OTHERS_FORGETTING = 0.98, 0.998
# What another engine has learned counts as so many timings.
RECALLED_STEPS = 10.0
# So many timings hardly move a line through more than that.
NEW_TIMINGS, MANY_TIMINGS = 4, 20
# A timing that far above the line was a pause, unless it repeats.
PAUSE, MAX_PAUSES = 4.0, 5
# Nothing is done faster than it can be: so many in a row that far below the line show
# that the machine was busy when the others were taken.
CHEAP, MAX_CHEAP = 0.5, 2


class CostLine:
    """Seconds = start + rows x slope + extra x something, fitted to recent timings.

    The extra is whatever else sets steps apart: 1 for one with trees, the levels of a
    draft. Rows are those that are computed, some of them for nothing.
    """

    def __init__(self, sizes: Sequence[int] = (), passes: bool = False) -> None:
        """Nothing is known yet.

        Args:
            sizes: What rows are padded to, ascending; none beyond the last.
            passes: The extra counts passes. Each may cost as much as the start, never
                less than nothing. Otherwise it is a trifle, also below nothing: few
                rows cost less each than more of them do, and so the line of the larger
                steps, those with trees, begins lower.
        """
        self._sizes, self._passes = sizes, passes
        self.clear()
        self._pauses = 0

    def clear(self) -> None:
        """Nothing is known."""
        # Of timings without an extra, and with one: the last ones that were cheap.
        self._num_cheap = [0, 0]
        # The line, and how many timings it lacks.
        self._solved: list[float] | None = None
        self._num_new = 0
        # Weighted normal equations of the features 1, rows, extra: of timings without
        # an extra, and with one. Lists, as all that is done with them in a step: of so
        # few numbers NumPy takes several times as long.
        self._products = [[[0.0] * 3 for _ in range(3)] for _ in range(2)]
        self._values = [[0.0] * 3 for _ in range(2)]

    @property
    def known(self) -> bool:
        """Something was observed."""
        return self.num_timings > 0

    @property
    def num_timings(self) -> float:
        """How many timings the line is drawn through; old ones count for less."""
        return sum(products[0][0] for products in self._products)

    def observe(self, rows: int, seconds: float, extra: float = 0.0) -> None:
        """Take in one timing unless it is a pause; forget what it shows to be wrong."""
        expected, kind = self.seconds(rows, extra), int(extra > 0)
        if self.known and seconds > PAUSE * expected:
            self._pauses += 1
            if self._pauses < MAX_PAUSES:
                return
            self.clear()  # not a pause: the machine changed
        is_cheap = seconds < CHEAP * expected
        self._num_cheap[kind] = self._num_cheap[kind] + 1 if is_cheap else 0
        if self._num_cheap[kind] == MAX_CHEAP:
            self.clear()
        self._pauses = 0
        self.take_in(rows, seconds, extra)

    def take_in(self, rows: int, seconds: float, extra: float = 0.0) -> None:
        """Take in one timing, however far from the line."""
        kind = int(extra > 0)
        self._scale(1 - kind, OTHERS_FORGETTING)
        self._scale(kind, FORGETTING)
        features = (1.0, float(self._padded(rows)), float(extra))
        _add(self._products[kind], self._values[kind], features, seconds)
        self._num_new += 1
        if self.num_timings < MANY_TIMINGS or self._num_new >= NEW_TIMINGS:
            self._solved = None

    def fade(self, count: int) -> None:
        """Timings count for as little as if so many had followed, but for one at least.

        Of things that have not happened for long; they may take another time by now.
        """
        if self.num_timings > 1:
            left = max(FORGETTING**count, 1 / self.num_timings)
            for kind in range(2):
                self._scale(kind, left)
            self._solved = None

    def _scale(self, kind: int, factor: float) -> None:
        self._products[kind] = [
            [factor * x for x in row] for row in self._products[kind]
        ]
        self._values[kind] = [factor * x for x in self._values[kind]]

    def seconds(self, rows: float, extra: float = 0.0) -> float:
        """What so many rows take; never falls with them."""
        return self.seconds_of([rows], extra)[0]

    def seconds_of(self, rows: Iterable[float], extra: float = 0.0) -> list[float]:
        """The same for several numbers of rows."""
        start, slope, more = self._coefficients()
        start += more * extra
        computed = map(self._padded, rows) if self._sizes else rows
        return [start + slope * n for n in computed]

    def _padded(self, rows: float) -> float:
        place = bisect_left(self._sizes, rows)
        return self._sizes[place] if place < len(self._sizes) else rows

    def marginal(self, rows: float, extra: float = 0.0) -> float:
        """What they add to a step that happens anyway, on average over all sizes."""
        _, slope, more = self._coefficients()
        return slope * rows + more * extra

    def learned(self) -> dict[str, list]:
        """What `recall` takes, as JSON has it."""
        return copy.deepcopy({"products": self._products, "values": self._values})

    def recall(self, learned: dict[str, list]) -> None:
        """Start from what another engine has learned, with little weight.

        Raises:
            ValueError: This is not what `learned` returns.
        """
        products = finite(learned["products"], (2, 3, 3))
        values = finite(learned["values"], (2, 3))
        num_timings = products[:, 0, 0].sum()
        if num_timings > 0 and values[:, 0].sum() > 0:
            weight = min(1.0, RECALLED_STEPS / num_timings)
            self._products = (weight * products).tolist()
            self._values = (weight * values).tolist()
            self._solved = None

    def _coefficients(self) -> list[float]:
        """[3] of the features; 0 while nothing is known."""
        if self._solved is not None:
            return self._solved
        if not self.known:
            return [0.0] * 3
        products = [_sums(*rows) for rows in zip(*self._products, strict=True)]
        values = _sums(*self._values)
        num, row_sum, num_extra = products[0]
        num_passes = num + num_extra if self._passes else num
        # Seconds per row.
        prior = values[0] / (row_sum + num_passes * PRIOR_ROWS)
        for at in (1.0, 65.0):
            seconds = prior * (at + PRIOR_ROWS)
            _add(products, values, (1.0, at, 0.0), seconds, PRIOR_WEIGHT)
        extra = prior * PRIOR_ROWS if self._passes else 0.0
        _add(products, values, (0.0, 0.0, 1.0), extra, EXTRA_WEIGHT)
        self._solved = _non_negative(products, values, () if self._passes else (2,))
        self._num_new = 0
        return self._solved


def finite(numbers: list, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of a file as an array; raises ValueError where they cannot be that."""
    try:
        array = np.array(numbers, float)
    except OverflowError:  # JSON's integers have no end
        array = np.array(np.inf)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(
            f"what was learned must be {list(shape)} numbers; got {numbers}"
        )
    return array


def _sums(some: list[float], others: list[float]) -> list[float]:
    return [x + y for x, y in zip(some, others, strict=True)]


def _add(
    products: list[list[float]],
    values: list[float],
    features: Sequence[float],
    seconds: float,
    weight: float = 1.0,
) -> None:
    """One more timing in normal equations."""
    for i, feature in enumerate(features):
        values[i] += weight * feature * seconds
        for j, other in enumerate(features):
            products[i][j] += weight * feature * other


def _non_negative(
    products: list[list[float]], values: list[float], free: Sequence[int]
) -> list[float]:
    """Least squares from normal equations; 0 where all but `free` would be negative."""
    used = list(range(len(values)))
    while True:
        equations = [[products[i][j] for j in used] + [values[i]] for i in used]
        found = dict(zip(used, _solved(equations), strict=True))
        negative = [(x, i) for i, x in found.items() if x < 0 and i not in free]
        if not negative:
            return [found.get(i, 0.0) for i in range(len(values))]
        used.remove(min(negative)[1])


def _solved(equations: list[list[float]]) -> list[float]:
    """The solution of positive definite equations, each its products and its value."""
    for i, pivot in enumerate(equations):
        for equation in equations[:i] + equations[i + 1 :]:
            factor = equation[i] / pivot[i]
            equation[:] = [x - factor * y for x, y in zip(equation, pivot, strict=True)]
    return [equation[-1] / equation[i] for i, equation in enumerate(equations)]
