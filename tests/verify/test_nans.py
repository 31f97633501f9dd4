"""NaNs are counted in the logits of every emitted token."""

from types import SimpleNamespace

import torch

from vllm_specinfer.verify.device_sampler import _nans_on_path
from vllm_specinfer.verify.sampler import _summed_nans


def test_the_host_sums_them_level_by_level():
    levels = [
        ([0, 1, 2], SimpleNamespace(num_nans=torch.tensor([1, 0, 2]))),
        ([0, 2], SimpleNamespace(num_nans=torch.tensor([5, 3]))),
        ([2], SimpleNamespace(num_nans=torch.tensor([4]))),
    ]
    assert _summed_nans(3, levels).tolist() == [6, 0, 9]
    assert _summed_nans(3, []) is None
    assert _summed_nans(1, [([0], SimpleNamespace(num_nans=None))]) is None


def test_the_device_sums_them_along_the_accepted_path():
    of_rows = torch.tensor([1, 10, 100, 1000, 2, 20, 200])
    first, count = torch.tensor([0, 4]), torch.tensor([2, 0])
    path = torch.tensor([[1, 3], [0, 0]])
    parts = list(of_rows.split(3))
    assert _nans_on_path(parts, first, path, count).tolist() == [1011, 2]
    assert _nans_on_path([None], first, path, count) is None
