"""What the host learns of a step that it drafts for, and which rows a head reads."""

import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from vllm_specinfer.drafting.host_steps import HostSteps
from vllm_specinfer.drafting.sources import Drafts
from vllm_specinfer.scheduling.step_stats import WorkerStats
from vllm_specinfer.tree.candidates import FinishedTrees
from vllm_specinfer.tree.table import TreeTable


def test_only_the_tree_of_the_step_itself_says_which_rows_stay():
    steps = HostSteps(mock.Mock(max_num_reqs=5), *[None] * 7)
    earlier, verified = WorkerStats(), WorkerStats()
    # Slot 2 has verified a tree in an earlier step, and none in this one.
    steps.note_accepted(4, [1, 3], verified)
    steps.note_accepted(2, [0, 2], earlier)
    slots, starts = np.array([4, 2, 0]), np.array([0, 6, 7])
    rows = steps._rows_that_stay(slots, starts, np.array([3, 1, 4]), verified)
    assert rows.tolist() == [0, 2, 4, 6, 7, 8, 9, 10]


def test_seconds_are_those_of_steps_and_of_drafts():
    sources, budget, memory = mock.Mock(), mock.Mock(), mock.Mock()
    trees, slots = TreeTable(max_num_reqs=5, num_nodes=3), np.array([4, 2])
    requests = mock.Mock(max_num_reqs=5, device=torch.device("cpu"))
    steps = HostSteps(requests, None, trees, sources, budget, memory, [], False)
    write = trees.write
    trees.write = lambda *args: (time.sleep(0.01), write(*args))
    for num_rows, decodes_only, work, num_growing in (
        (2, True, (4, 1), 2),
        (3, True, (6, 2), 2),
        (8, True, None, 2),
        (40, False, (80, 0), 2),
        # Inside prompts.
        (64, False, (64, 0), 0),
    ):
        none = FinishedTrees.none(num_growing, 3, 1)
        drawn = [{}] * num_growing
        sources.propose.return_value = Drafts(none, drawn, [], {}, work)
        batch = SimpleNamespace(num_tokens=num_rows, num_reqs=2, req_ids=["a", "b"])
        asked = mock.Mock(input_batch=batch, num_nodes=3)
        step = SimpleNamespace(
            slots=slots,
            growing=np.arange(num_growing),
            roots=SimpleNamespace(roots=np.zeros(num_growing, np.int64)),
            decodes_only=decodes_only,
        )
        steps._step = lambda *_, step=step: step
        assert steps.draft(asked, WorkerStats(), WorkerStats()).shape == (2, 3)
    observed = [call.args for call in budget.observe_step.call_args_list]
    assert [(rows, has_trees) for rows, _, has_trees in observed] == [
        (2, False),
        (3, True),
        (8, True),
    ]
    # Between the end of drafting and the next time it is asked for.
    assert all(0 < seconds < 60 for _, seconds, _ in observed[1:])
    assert memory.note_step.call_count == 3
    # Where SSMs were asked, with what the host does about it.
    drafts = [call.args for call in budget.observe_draft.call_args_list]
    assert [args[:3] for args in drafts] == [(2, 4, 1), (2, 6, 2), (2, 80, 0)]
    assert all(0.01 <= seconds < 60 for *_, seconds in drafts)
    ((num_reqs, seconds),) = [
        call.args for call in budget.observe_prompts.call_args_list
    ]
    assert num_reqs == 2 and 0.01 <= seconds < 60
