"""Which of the target's rows a head reads after a step."""

import numpy as np

from vllm_specinfer.scheduling.step_stats import WorkerStats
from vllm_specinfer.speculator import TreeSpeculator


def test_only_the_tree_of_the_step_itself_says_which_rows_stay():
    speculator = TreeSpeculator.__new__(TreeSpeculator)
    earlier, speculator._verifying = WorkerStats(), WorkerStats()
    # Slot 2 has verified a tree in an earlier step, and none in this one.
    speculator._accepted = {
        4: (speculator._verifying, [1, 3]),
        2: (earlier, [0, 2]),
    }
    slots, starts = np.array([4, 2, 0]), np.array([0, 6, 7])
    rows = speculator._rows_that_stay(slots, starts, np.array([3, 1, 4]))
    assert rows.tolist() == [0, 2, 4, 6, 7, 8, 9, 10]
