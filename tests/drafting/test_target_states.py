"""The rows that a head reads are those that the host would choose."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.speculator import TreeSpeculator


def test_the_last_rows_are_the_root_and_its_path():
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_reqs, num_nodes = rng.integers(1, 5, 2)
        window = int(num_nodes + rng.integers(1, 3))
        sizes = 1 + rng.integers(0, num_nodes + 1, num_reqs)
        first = np.cumsum(sizes) - sizes
        counts = [int(rng.integers(0, size)) for size in sizes]
        path = np.zeros((num_reqs, num_nodes), np.int32)
        for i, count in enumerate(counts):
            rows = rng.choice(np.arange(1, sizes[i]), count, replace=False)
            path[i, :count] = np.sort(rows)
        states = torch.arange(sizes.sum())[:, None]
        found = TargetStates(
            states, torch.from_numpy(first).int(), torch.from_numpy(path)
        ).last(torch.tensor(counts) + 1, window)
        assert found.shape == (num_reqs, window, 1)
        for i, count in enumerate(counts):
            expected = [first[i], *(first[i] + path[i, :count])]
            assert found[i, -count - 1 :, 0].tolist() == expected


@pytest.mark.parametrize("of_layers", [False, True])
def test_states_outlive_the_memory_that_the_target_has_left_them_in(of_layers):
    speculator = TreeSpeculator.__new__(TreeSpeculator)
    speculator._reads_layers, speculator._reads_states = of_layers, True
    speculator._ahead, speculator.num_speculative_steps = None, 3
    speculator.device, speculator.sources = torch.device("cpu"), mock.Mock()
    hidden = torch.ones(2, 1)
    batch = SimpleNamespace(num_reqs=1)
    speculator.propose(batch, None, None, hidden, [hidden], None, None)
    hidden.zero_()  # a graph is replayed
    assert speculator._asked.states.tolist() == [[1], [1]]
