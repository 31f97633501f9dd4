"""Products in bfloat16, or in float32 where the device is slow at those.

A CPU without AVX512_BF16 takes several times as long for bfloat16 as for float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def fast_dtype(device: torch.device) -> torch.dtype:
    """What the device multiplies quickest: float32 or bfloat16."""
    slow = device.type == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if slow else torch.bfloat16


def training_device() -> torch.device:
    """Where models are trained."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mixed_precision(device: torch.device) -> torch.autocast:
    """Modules of float32 multiply as bfloat16 in it, if the device does so faster."""
    fast = fast_dtype(device) == torch.bfloat16
    return torch.autocast(device.type, torch.bfloat16, enabled=fast)


class InFloat32(TorchFunctionMode):
    """Whoever asks for a tensor as bfloat16 gets a copy as it is."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.bfloat16:
            func = torch.Tensor.clone
        return func(*args, **(kwargs or {}))
