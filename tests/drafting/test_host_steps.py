"""Which of the target's rows a head reads after a step."""

from unittest import mock

import numpy as np

from vllm_specinfer.drafting.host_steps import HostSteps
from vllm_specinfer.scheduling.step_stats import WorkerStats


def test_only_the_tree_of_the_step_itself_says_which_rows_stay():
    steps = HostSteps(mock.Mock(max_num_reqs=5), *[None] * 7)
    earlier, verified = WorkerStats(), WorkerStats()
    # Slot 2 has verified a tree in an earlier step, and none in this one.
    steps.note_accepted(4, [1, 3], verified)
    steps.note_accepted(2, [0, 2], earlier)
    slots, starts = np.array([4, 2, 0]), np.array([0, 6, 7])
    rows = steps._rows_that_stay(slots, starts, np.array([3, 1, 4]), verified)
    assert rows.tolist() == [0, 2, 4, 6, 7, 8, 9, 10]
