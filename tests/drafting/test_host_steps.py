"""What the host learns of a step that it drafts for, and which rows a head reads."""

import time
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from vllm.sampling_params import SamplingParams

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


def test_requests_that_have_ended_get_no_tree():
    """By their length, or by a token of the last step, wherever it stands in it."""
    texts = torch.tensor(
        [
            [9, 1, 2, 3, 0, 0],  # the prompt's token is not the request's own
            [1, 2, 9, 3, 0, 0],
            [1, 2, 3, 7, 0, 0],
            [1, 2, 3, 9, 0, 0],  # this one goes on behind it
            [1, 2, 3, 4, 5, 6],
            [1, 2, 3, 9, 0, 0],  # inside its prompt
        ],
        dtype=torch.int32,
    )
    requests = SimpleNamespace(
        max_num_reqs=6,
        total_len=SimpleNamespace(gpu=torch.tensor([4, 4, 4, 4, 6, 4])),
        num_computed_tokens=SimpleNamespace(gpu=torch.tensor([3, 3, 3, 3, 5, 2])),
        max_seq_len=np.full(6, 6),
        all_token_ids=SimpleNamespace(gpu=texts),
    )
    trees = TreeTable(max_num_reqs=6, num_nodes=3)
    steps = HostSteps(requests, mock.MagicMock(), trees, *[None] * 4, False)
    for slot in range(6):
        params = SamplingParams(stop_token_ids=[7], ignore_eos=slot == 3)
        params.update_from_generation_config({}, eos_token_id=9)
        steps.start(slot, params)
    batch = SimpleNamespace(
        idx_mapping_np=np.array([4, 3, 2, 1, 0, 5]),
        positions=torch.zeros(12, dtype=torch.int64),
        num_tokens=12,
    )
    sampled = torch.tensor([2, 2, 2, 2, 2, 0])
    asked = SimpleNamespace(input_batch=batch, states=None, num_sampled=sampled)
    step, decodes_only = steps._step(asked, WorkerStats())
    assert not decodes_only
    assert step.slots[step.growing].tolist() == [3, 0] and not step.ended
    # Those that have ended alone, and a prompt that has more than a token to come.
    batch.idx_mapping_np, asked.num_sampled = np.array([4, 2, 1, 5]), sampled[2:]
    for max_tokens in (1, 2):
        requests.max_seq_len[5] = 4 + max_tokens
        step, decodes_only = steps._step(asked, WorkerStats())
        assert not decodes_only
        assert not len(step.growing) and step.ended is (max_tokens == 1)
    # Without the prompt, behind a request that has just started, and beside a prompt.
    batch.idx_mapping_np, asked.num_sampled = np.array([4, 2, 1]), sampled[:3]
    assert steps._step(asked, WorkerStats())[1]
    steps.start(0, params)
    assert not steps._step(asked, WorkerStats())[1]
    asked.num_sampled = sampled[3:]
    assert not steps._step(asked, WorkerStats())[1]
    asked.num_sampled = sampled[:3]
    assert steps._step(asked, WorkerStats())[1]


def test_seconds_are_those_of_steps_and_of_drafts():
    sources, budget, memory = mock.Mock(), mock.Mock(), mock.Mock()
    trees, slots = TreeTable(max_num_reqs=5, num_nodes=3), np.array([4, 2])
    requests = mock.Mock(max_num_reqs=5, device=torch.device("cpu"))
    steps = HostSteps(requests, None, trees, sources, budget, memory, [], False)
    write = trees.write
    trees.write = lambda *args: (time.sleep(0.01), write(*args))
    for num_rows, decodes_only, work, num_growing, ended in (
        (2, True, (4, 1), 2, False),
        (3, True, (6, 2), 2, False),
        (8, True, None, 2, False),
        (40, False, (80, 0), 2, False),
        # Inside prompts.
        (64, False, (64, 0), 0, False),
        # Heads read to the end.
        (8, False, (8, 0), 0, True),
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
            ended=ended,
        )
        steps._step = lambda *_, found=(step, decodes_only): found
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
