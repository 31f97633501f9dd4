"""Linear layers of a step's rows: C++ kernels, and where they are worth their place.

vLLM multiplies with oneDNN, on weights that oneDNN has rearranged, whose time grows
with every row of a tree. The kernels read the weights as they are: `few_rows.cpp` once,
in their order, `row_panels.cpp` for some tens of rows and more; pairs of bfloat16 are
multiplied as such where the CPU can. Where it multiplies tiles of bfloat16 (AMX), the
weights lie in tiles, and `tile_rows.cpp` takes any number of rows.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import nn

from vllm_specinfer.kernels.cpu import extension

DTYPES = (torch.float32, torch.bfloat16)
_MULTIPLE = 16  # of weights in a row: a vector of them
# Of a tile: outputs or rows, and inputs, which come in pairs.
_SIDE, _DEPTH = 16, 32
_STRIP = 2 * _SIDE  # outputs whose tiles lie together

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Kernel(NamedTuple):
    """What multiplies by some weights.

    Attributes:
        linear: A function of x [..., K], `weight` and bias [N] or None to [..., N], of
            the same dtype; a torch operator, so that models are compiled with it.
        weight: The weights as it takes them: as they were, or a copy in tiles.
    """

    linear: Linear
    weight: torch.Tensor


def kernel_for(weight: torch.Tensor) -> Kernel | None:
    """What to multiply with, or None where vLLM's own way is the better one.

    Args:
        weight: [N, K].
    """
    if (
        weight.dtype not in DTYPES
        or weight.device.type != "cpu"
        or weight.dim() != 2
        or not weight.is_contiguous()
        or not weight.numel()
        or weight.shape[1] % _MULTIPLE
        or not torch.cpu._is_avx512_supported()
        or extension.load() is None
    ):
        return None
    _describe()
    if weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        # The first product of an engine may be this one.
        if weight.shape[1] % _DEPTH or not _has_tiles() or not torch.cpu._init_amx():
            return None
        multiply = torch.ops.vllm_specinfer.linear_in_tiles.default
        return Kernel(partial(multiply, outputs=weight.shape[0]), _in_tiles(weight))
    return Kernel(torch.ops.vllm_specinfer.linear.default, weight)


def take_over(layer: nn.Module, remove_weight: bool) -> bool:
    """Have a layer multiply with the kernels where they are the better way.

    Args:
        layer: Its `weight` has been loaded; its `cpu_linear` is what vLLM calls.
        remove_weight: Nothing else reads the weights as they were.

    Returns:
        Whether they are.
    """
    kernel = kernel_for(layer.weight)
    if kernel is None:
        return False
    layer.cpu_linear = kernel.linear
    if remove_weight and kernel.weight is not layer.weight:
        layer.weight = nn.Parameter(kernel.weight, requires_grad=False)
    elif kernel.weight is not layer.weight:
        layer.cpu_linear = lambda x, _, bias: kernel.linear(x, kernel.weight, bias)
    return True


def row_sizes(model: nn.Module, most: int) -> list[int]:
    """Numbers of rows up to `most` or more between which no time is saved.

    None where no layer of the model multiplies with the kernels.
    """
    operators = _operators(model)
    if not operators:
        return []
    kernels, few = extension.load(), 0
    step = kernels.tile_rows
    if torch.ops.vllm_specinfer.linear.default in operators:
        few, step = kernels.few_rows, kernels.row_step
    return [*range(1, few + 1), *range(-(-(few + 1) // step) * step, most + step, step)]


def _operators(model: nn.Module) -> set[Linear]:
    """The kernels of a model's layers."""
    if extension.load() is None:
        return set()
    operators = torch.ops.vllm_specinfer
    ours = {operators.linear.default, operators.linear_in_tiles.default}
    found = (getattr(module, "cpu_linear", None) for module in model.modules())
    return ours & {getattr(linear, "func", linear) for linear in found}


def _has_tiles() -> bool:
    """The compiler that built the kernels knows AMX, too."""
    return extension.load().tile_rows > 0


def _in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """[strips, K * 32] a copy of weights [N, K], zeros behind the last output."""
    n, k = weight.shape
    strips = -(-n // _STRIP)
    if n % _STRIP:  # padding copies, even by nothing
        weight = nn.functional.pad(weight, (0, 0, 0, strips * _STRIP - n))
    tiles = weight.view(strips, 2, _SIDE, k // _DEPTH, _DEPTH // 2, 2)
    return tiles.permute(0, 3, 1, 4, 2, 5).reshape(strips, -1)


@cache
def _describe() -> None:
    """Tell torch.compile what comes out."""

    @torch.library.register_fake("vllm_specinfer::linear")
    def _(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    @torch.library.register_fake("vllm_specinfer::linear_in_tiles")
    def _(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        outputs: int,
    ) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], outputs))
