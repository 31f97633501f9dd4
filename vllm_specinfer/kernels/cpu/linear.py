"""Linear layers of a step's rows: C++ kernels, and where they are worth their place.

vLLM multiplies with oneDNN, on weights that oneDNN has rearranged, whose time grows
with every row of a tree. The kernels read the weights as they are: `few_rows.cpp` once,
in their order, `row_panels.cpp` for some tens of rows and more; pairs of bfloat16 are
multiplied as such where the CPU can.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from vllm_specinfer.kernels.cpu import extension

DTYPES = (torch.float32, torch.bfloat16)
_MULTIPLE = 16  # of weights in a row: a vector of them

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def linear_for(weight: torch.Tensor) -> Linear | None:
    """What to multiply with, or None where vLLM's own way is the better one.

    Args:
        weight: [N, K].

    Returns:
        A function of x [..., K], weight [N, K] and bias [N] or None to [..., N], of the
        same dtype; a torch operator, so that models are compiled with it.
    """
    if (
        weight.dtype not in DTYPES
        or weight.device.type != "cpu"
        or weight.dim() != 2
        or not weight.is_contiguous()
        or weight.shape[1] % _MULTIPLE
        or not torch.cpu._is_avx512_supported()
        # Tiles multiply bfloat16 many times as fast.
        or (weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())
        or extension.load() is None
    ):
        return None
    _describe()
    return torch.ops.vllm_specinfer.linear.default


def multiplies_in(model: nn.Module) -> bool:
    """Whether some layer of the model multiplies with the kernels."""
    if extension.load() is None:
        return False
    ours = torch.ops.vllm_specinfer.linear.default
    return any(getattr(m, "cpu_linear", None) is ours for m in model.modules())


def row_sizes(most: int) -> list[int]:
    """Numbers of rows up to `most` or more between which no time is saved."""
    few, step = extension.load().few_rows, extension.load().row_step
    return [*range(1, few + 1), *range(-(-(few + 1) // step) * step, most + step, step)]


@cache
def _describe() -> None:
    """Tell torch.compile what comes out."""

    @torch.library.register_fake("vllm_specinfer::linear")
    def _(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
