"""What crosses between host and device: few copies, and none where both are one.

The host reads by `read` and waits, or by `read_later` and waits later; it sends by
`stage` and `StagedBuffers`. On a CPU `read` and `stage` are views of the same memory.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

# Kernels may assume that tensors begin at such addresses.
ALIGNMENT = 16


Arrays = tuple[np.ndarray, ...]
T = TypeVar("T")


def read(*tensors: torch.Tensor) -> Arrays:
    """The values of tensors on one device, in one copy; views on a CPU."""
    return read_later(*tensors)()


def read_later(*tensors: torch.Tensor) -> Callable[[], Arrays]:
    """`read` whose copy starts now; the host waits where the result is called."""
    if is_host(tensors[0].device):
        arrays = tuple(tensor.numpy() for tensor in tensors)
        return lambda: arrays
    parts = [_bytes(tensor) for tensor in tensors]
    copy = torch.cat(parts).to("cpu", non_blocking=True)
    copied = None
    if tensors[0].is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    ends = list(itertools.accumulate(map(len, parts)))

    def wait() -> Arrays:
        found = _waited(copy, copied)
        return tuple(
            # A copy begins at an address that fits its type.
            found[end - len(part) : end]
            .copy()
            .view(_numpy_type(tensor.dtype))
            .reshape(tensor.shape)
            for tensor, part, end in zip(tensors, parts, ends, strict=True)
        )

    return wait


def stage(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Arrays on the device, in one copy that nobody waits for; views on a CPU."""
    if is_host(device):
        return tuple(torch.from_numpy(array) for array in arrays)
    return _views(async_tensor_h2d(_packed(arrays), device=device), arrays)


class Once(Generic[T]):
    """A result that whoever asks first waits for, on whichever thread."""

    def __init__(self, find: Callable[[], T]) -> None:
        """`find` is called once, or never."""
        self._find: Callable[[], T] | None = find
        self._lock = threading.Lock()

    def __call__(self) -> T:
        """The result."""
        with self._lock:
            if self._find is not None:
                self._found = self._find()
                self._find = None  # and what it holds
            return self._found


class Moment:
    """When the device comes to a place in its work; the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """Now, in the device's order."""
        self._event: torch.cuda.Event | None = None
        self._time = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def seconds_since(self, earlier: "Moment") -> float:
        """Between two moments, once both are past."""
        if self._event is None:
            return self._time - earlier._time
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1000


class StagedBuffers:
    """Tensors on the device that stay where they are, filled in one copy.

    Attributes:
        tensors: As the arrays that they were made for.
    """

    def __init__(self, device: torch.device, *arrays: np.ndarray) -> None:
        """Tensors of the arrays' shapes and types, with their values."""
        self._sent = async_tensor_h2d(_packed(arrays), device=device)
        self.tensors = _views(self._sent, arrays)

    def fill(self, *arrays: np.ndarray) -> None:
        """Other values, of the same shapes and types; nobody waits for the copy."""
        async_tensor_h2d(_packed(arrays), out=self._sent)


def write_rows(
    target: torch.Tensor,
    slots: torch.Tensor,
    slots_on_host: np.ndarray,
    values: torch.Tensor,
) -> None:
    """Write the first columns of some rows.

    Args:
        target: [S, N].
        slots: [R] int64 rows of it, distinct.
        slots_on_host: [R] the same.
        values: [R, n].
    """
    if is_host(target.device):  # torch takes several times as long
        target.numpy()[slots_on_host, : values.shape[1]] = values.numpy()
    else:
        target[slots, : values.shape[1]] = values


def token_rows(tokens: StagedWriteTensor) -> np.ndarray:
    """[S, max_model_len] int32 tokens of all slots, as they were at the last `read`.

    A GPU writes them to host memory (vllm/v1/worker/gpu/states.py); a worker without
    such memory is refused.
    """
    on_host = getattr(tokens, "_uva_buf", None)
    return tokens.gpu.numpy() if on_host is None else on_host.np


def as_array(host_tensor: torch.Tensor) -> np.ndarray:
    """What lies on the host in any case."""
    return host_tensor.numpy()


def is_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's."""
    return device.type == "cpu"


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins among packed ones, in bytes, and where they all end."""
    sizes = (-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)
    return list(itertools.accumulate(sizes, initial=0))


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    *starts, end = _starts(arrays)
    # A tensor of nothing cannot be viewed as another type.
    packed = np.zeros(max(end, 1), np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed[start : start + array.nbytes] = values
    return packed


def _views(
    packed: torch.Tensor, arrays: Sequence[np.ndarray]
) -> tuple[torch.Tensor, ...]:
    """Packed arrays as tensors."""
    return tuple(
        packed[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(_starts(arrays), arrays, strict=False)
    )


def _waited(copy: torch.Tensor, copied: torch.cuda.Event | None) -> np.ndarray:
    """A copy on the host, once it is there."""
    if copied is not None:
        copied.synchronize()
    return copy.numpy()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Dimensions of one element may have any stride, which a view by bytes refuses.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
