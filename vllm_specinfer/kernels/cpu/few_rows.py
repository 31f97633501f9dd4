"""Linear layers of few rows: the C++ kernel, and where it is worth its place.

vLLM multiplies with oneDNN, on weights that oneDNN has rearranged, whose time grows
with every row of a tree. The kernel reads the weights as they are, once, and leaves
passes of many rows to torch.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm_specinfer.kernels.cpu import extension

# Rows up to which the kernel is the faster one. Where a CPU has no instructions of its
# own for bfloat16 that are worth the name, its products in float32 are hard to beat.
MOST_ROWS = {torch.float32: 48, torch.bfloat16: 256}
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
    operator = torch.ops.vllm_specinfer.few_rows_linear.default
    return lambda x, weight, bias=None: operator(x, weight, bias, most)


@cache
def _describe() -> None:
    """Tell torch.compile what comes out."""

    @torch.library.register_fake("vllm_specinfer::few_rows_linear")
    def _(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, most: int
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))
