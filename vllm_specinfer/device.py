"""What crosses between host and device: few copies, and none where both are one.

Trees are planned and grown on the host, in NumPy. Everything that a step reads
from the device for it goes through `read`, where the host waits; everything it sends
goes through `stage`, where it does not. On a CPU both are views of the same memory.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

# Kernels may assume that tensors begin at such addresses.
ALIGNMENT = 16


def read(*tensors: torch.Tensor) -> tuple[np.ndarray, ...]:
    """The values of tensors on one device, in one copy; views on a CPU."""
    if is_host(tensors[0].device):
        return tuple(tensor.numpy() for tensor in tensors)
    parts = [_bytes(tensor) for tensor in tensors]
    found = torch.cat(parts).cpu().numpy()
    arrays, end = [], 0
    for tensor, part in zip(tensors, parts, strict=True):
        start, end = end, end + len(part)
        # A copy begins at an address that fits its type.
        values = found[start:end].copy().view(_numpy_type(tensor.dtype))
        arrays.append(values.reshape(tensor.shape))
    return tuple(arrays)


def stage(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Arrays on the device, in one copy that nobody waits for; views on a CPU."""
    if is_host(device):
        return tuple(torch.from_numpy(array) for array in arrays)
    return _views(async_tensor_h2d(_packed(arrays), device=device), arrays)


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


def token_rows(tokens: StagedWriteTensor) -> np.ndarray:
    """[S, max_model_len] int32 tokens of all slots, as they were at the last `read`.

    A GPU writes them to host memory (vllm/v1/worker/gpu/states.py); a worker without
    such memory is refused.
    """
    on_host = getattr(tokens, "_uva_buf", None)
    return tokens.gpu.numpy() if on_host is None else on_host.np


def is_host(device: torch.device) -> bool:
    """Whether the device's memory is the host's."""
    return device.type == "cpu"


def _starts(arrays: Sequence[np.ndarray]) -> list[int]:
    """Where each array begins among packed ones, in bytes, and where they all end."""
    sizes = (-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)
    return list(itertools.accumulate(sizes, initial=0))


def _packed(arrays: Sequence[np.ndarray]) -> np.ndarray:
    *starts, end = _starts(arrays)
    packed = np.zeros(end, np.uint8)
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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Dimensions of one element may have any stride, which a view by bytes refuses.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
