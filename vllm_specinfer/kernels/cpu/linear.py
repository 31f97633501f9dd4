"""Linear layers of a step's rows: C++ kernels, and where they are worth their place.

vLLM multiplies with oneDNN, on weights that oneDNN has rearranged, whose time grows
with every row of a tree. The kernels read the weights as they are: `few_rows.cpp` once,
in their order, `row_panels.cpp` for some tens of rows and more; pairs of bfloat16 are
multiplied as such where the CPU can. Passes of very many rows are left to torch.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm_specinfer.kernels.cpu import extension

# Rows up to which torch is not the faster one.
MOST_ROWS = {torch.float32: 256, torch.bfloat16: 8192}
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
    most = MOST_ROWS.get(weight.dtype)
    if (
        most is None
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
    operator = torch.ops.vllm_specinfer.linear.default
    return lambda x, weight, bias=None: operator(x, weight, bias, most)


@cache
def _describe() -> None:
    """Tell torch.compile what comes out."""

    @torch.library.register_fake("vllm_specinfer::linear")
    def _(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
