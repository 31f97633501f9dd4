"""What crosses between host and device arrives as it was, in one copy."""

import numpy as np
import pytest
import torch

from vllm_specinfer import device

CPU = torch.device("cpu")
SHAPES = [(3,), (2, 3), (0,), (4, 0, 2), (1, 1), (5, 1)]
TYPES = [np.int64, np.int32, np.float32, np.float64, np.bool_, np.uint8]


@pytest.fixture
def elsewhere(monkeypatch):
    """A device whose memory is not the host's; the copies that were waited for."""
    monkeypatch.setattr(device, "is_host", lambda device: False)
    copies = []
    waited = device._waited

    def counted(copy, copied):
        copies.append(copy)
        return waited(copy, copied)

    monkeypatch.setattr(device, "_waited", counted)
    return copies


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        (rng.random(shape) * 100).astype(kind) for shape in SHAPES for kind in TYPES
    ]


def test_all_tensors_are_read_in_one_copy(elsewhere):
    expected = arrays()
    found = device.read(*map(torch.from_numpy, expected))
    assert len(elsewhere) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one == other).all() and one.flags.aligned
        assert not np.shares_memory(one, other)


def test_what_is_read_later_is_as_it_was_at_once(elsewhere):
    tensor = torch.arange(3)
    later = device.read_later(tensor)
    tensor += 1
    assert not elsewhere
    assert later()[0].tolist() == [0, 1, 2]


def test_parts_of_tensors_are_read(elsewhere):
    table = torch.arange(24, dtype=torch.int32).view(4, 6)
    parts = table[:2, :1], table[:1, :1].T, table[1:, 2:5], table.T, table[:, 3]
    for one, other in zip(device.read(*parts), parts, strict=True):
        assert one.tolist() == other.tolist()


def test_all_arrays_are_staged_where_kernels_may_read_them(elsewhere):
    expected = [*arrays(), np.arange(12)[::3], np.arange(12).reshape(3, 4).T]
    found = device.stage(CPU, *expected)
    storages = {tensor.untyped_storage().data_ptr() for tensor in found}
    assert len(storages) == 1
    for one, other in zip(found, expected, strict=True):
        assert one.numpy().dtype == other.dtype and one.shape == other.shape
        assert (one.numpy() == other).all()
        start = one.storage_offset() * one.element_size()
        assert start % device.ALIGNMENT == 0 and one.is_contiguous()


def test_nothing_but_an_empty_array_is_staged_and_read(elsewhere):
    (staged,) = device.stage(CPU, np.zeros((0, 3), np.int64))
    assert staged.dtype == torch.int64 and staged.shape == (0, 3)
    (found,) = device.read(staged)
    assert found.dtype == np.int64 and found.shape == (0, 3)


def test_on_a_cpu_nothing_is_copied():
    tensor, array = torch.arange(3), np.arange(3)
    assert np.shares_memory(device.read(tensor)[0], tensor.numpy())
    assert np.shares_memory(device.stage(CPU, array)[0].numpy(), array)
