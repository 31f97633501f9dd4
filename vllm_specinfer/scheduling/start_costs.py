"""What steps cost, measured before the first request.

A pass of made-up tokens takes what a step of as many rows takes, but for its context.
The steps themselves correct it from then on (`cost.py`), so a few passes will do.
"""

import statistics
from collections.abc import Callable

from vllm_specinfer.scheduling.load_budget import LoadBudget

MOST_ROWS = 64
ROUNDS = 3
# No new pass begins after so many seconds: a large model needs that long for a few.
SECONDS = 3.0


def measure(
    budget: LoadBudget, run: Callable[[int], tuple[float, float]], most_rows: int
) -> None:
    """Tell the budget what 1, 2, 4, ... rows cost; the medians of up to `ROUNDS`.

    Args:
        budget: Forgets what it has recalled of costs: the machine may have been busy.
        run: Runs a pass of so many rows and returns the seconds of the target and of
            the SSMs.
        most_rows: Most rows that a step can have.
    """
    sizes = [1 << k for k in range(min(most_rows, MOST_ROWS).bit_length())]
    timings: dict[int, list[tuple[float, float]]] = {}
    spent = 0.0
    for rows in sizes * ROUNDS:
        if spent > SECONDS:
            break
        timings.setdefault(rows, []).append(run(rows))
        spent += sum(timings[rows][-1])
    budget.start_from(
        {
            rows: tuple(map(statistics.median, zip(*seconds, strict=True)))
            for rows, seconds in timings.items()
        }
    )
