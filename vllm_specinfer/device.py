"""What crosses between host and device: few copies, and none where both are one.

Trees are planned and grown on the host, in NumPy. Everything that a step reads
from the device for it goes through `read`, where the host waits; everything it sends
goes through `stage`, where it does not. On a CPU both are views of the same memory.
"""

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
    views = [torch.from_numpy(array) for array in arrays]
    if is_host(device):
        return tuple(views)
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays])
    starts = [0, *ends[:-1].tolist()]
    packed = np.empty(ends[-1], np.uint8)
    for start, array in zip(starts, arrays, strict=True):
        values = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed[start : start + array.nbytes] = values
    sent = async_tensor_h2d(packed, device=device)
    return tuple(
        sent[start : start + view.nbytes].view(view.dtype).view(view.shape)
        for start, view in zip(starts, views, strict=True)
    )


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Dimensions of one element may have any stride, which a view by bytes refuses.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _numpy_type(dtype: torch.dtype) -> np.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype
