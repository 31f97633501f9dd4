"""Linear layers of a step's rows: C++ kernels, and where they are worth their place.

vLLM multiplies with oneDNN, whose time grows with every row of a tree, or, types of 16
bits where oneDNN needs a newer CPU, with PyTorch's layers for any device. `strips.cpp`
reads the weights once for the rows of a tree, in the order they lie in, and pairs of
bfloat16 are multiplied as such where the CPU can. Reading takes most of a small step's
time, so that weights lie in huge pages, and a float32 model's are kept as bfloat16 or
float16 where each of them is the same number there, as it is in models that were
published so. Where the CPU multiplies tiles of bfloat16 (AMX), their weights lie in
tiles for `tile_rows.cpp`, and float16, which such a CPU multiplies, too, is oneDNN's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from vllm_specinfer.kernels.cpu import extension, huge_pages

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Smaller types that may hold all weights of a float32 model.
_SMALLER = (torch.bfloat16, torch.float16)
# Of a tile: outputs or rows, and inputs, which come in pairs.
_SIDE, _DEPTH = 16, 32

Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# Gives [count] of a type, not initialised.
Empty = Callable[[int, torch.dtype], torch.Tensor]


class Kernel(NamedTuple):
    """What multiplies by some weights.

    Attributes:
        linear: A function of x [..., K], `weight` and bias [N] or None to [..., N], of
            the same dtype; a torch operator, so that models are compiled with it.
        weight: A copy of the weights as it takes them. Its dtype is theirs, whatever
            its bytes are.
    """

    linear: Linear
    weight: torch.Tensor


@dataclass(eq=False)
class OfCopy:
    """Multiplies by a copy of a layer's weight, which others read as it was.

    It is made for the first product: of most embeddings there is none.

    Attributes:
        kernel: With the copy.
    """

    kernel: Kernel | None = field(default=None, init=False, repr=False)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Kernel.linear`, by the weight as it was when it was copied."""
        if self.kernel is None:
            self.kernel = kernel_for(weight)
        return self.kernel.linear(x, self.kernel.weight, bias)


def kernel_for(
    weight: torch.Tensor,
    stored: torch.dtype | None = None,
    empty: Empty | None = None,
) -> Kernel | None:
    """What to multiply with, or None where vLLM's own way is the better one.

    Args:
        weight: [N, K].
        stored: The type of a float32 weight's bytes where it has every number of it,
            otherwise they are float32's; by default the smallest that has.
        empty: Gives the memory of the kernel's weight; by default in huge pages.
    """
    if not _fits(weight):
        return None
    empty = empty or huge_pages.empty
    _describe()
    operators, outputs = torch.ops.vllm_specinfer, len(weight)
    if _goes_in_tiles(weight):
        multiply = partial(operators.linear_in_tiles.default, outputs=outputs)
        return Kernel(multiply, _in_tiles(weight, empty))
    fewer = _in_few_bytes(weight, (stored,) if stored else _SMALLER)
    stored = stored or fewer.dtype
    multiply = partial(operators.linear.default, outputs=outputs, stored=stored)
    strips = _in_strips(fewer, extension.load().strip, empty)
    return Kernel(multiply, strips.view(weight.dtype))


def take_over(layer: nn.Module, remove_weight: bool) -> Linear | None:
    """Have a layer multiply with the kernels where they are the better way.

    Args:
        layer: Its `weight` has been loaded, for the first time or again; its
            `cpu_linear` is what vLLM calls. Models that have been compiled with an
            earlier one multiply by the new weight, too.
        remove_weight: Nothing else reads the weights as they were.

    Returns:
        What multiplies; None where they are not.
    """
    if not _fits(layer.weight):
        return None
    if remove_weight:
        stored = empty = None
        if isinstance(before := getattr(layer, "cpu_linear", None), partial):
            stored, empty = before.keywords.get("stored"), _for_now
        layer.cpu_linear, strips = kernel_for(layer.weight, stored, empty)
        layer.weight = nn.Parameter(strips, requires_grad=False)
    else:
        layer.cpu_linear = OfCopy()
    return layer.cpu_linear


def drop_copies(model: nn.Module) -> None:
    """Forget copies of weights that are others by now, as of heads that are tied."""
    for module in model.modules():
        linear = getattr(module, "cpu_linear", None)
        if isinstance(linear, OfCopy):
            linear.kernel = None


def row_sizes(model: nn.Module, most: int) -> list[int]:
    """Numbers of rows up to `most` or more between which no time is saved.

    None where no layer of the model multiplies in tiles: each row takes its time.
    """
    if extension.load() is None:
        return []
    in_tiles = torch.ops.vllm_specinfer.linear_in_tiles.default
    linears = (getattr(module, "cpu_linear", None) for module in model.modules())
    if all(getattr(linear, "func", None) is not in_tiles for linear in linears):
        return []
    step = extension.load().tile_rows
    return [*range(step, most + step, step)]


def _fits(weight: torch.Tensor) -> bool:
    """Whether the kernels are the better way to multiply by this."""
    if (
        weight.dtype not in DTYPES
        or weight.device.type != "cpu"
        or weight.dim() != 2
        or not weight.is_contiguous()
        or not weight.numel()
        or weight.shape[1] % 2
        or not torch.cpu._is_avx2_supported()
        or (kernels := extension.load()) is None
    ):
        return False
    if not _goes_in_tiles(weight):
        return True
    whole = weight.dtype == torch.bfloat16 and not weight.shape[1] % _DEPTH
    # The first product of an engine may be this one.
    return bool(whole and kernels.tile_rows and torch.cpu._init_amx())


def _goes_in_tiles(weight: torch.Tensor) -> bool:
    """Whether the CPU multiplies such weights in tiles or not at all."""
    return weight.dtype != torch.float32 and torch.cpu._is_amx_tile_supported()


def _in_few_bytes(
    weight: torch.Tensor, smaller: tuple[torch.dtype, ...]
) -> torch.Tensor:
    """The weights in the first of these types that has every one of them, or as is."""
    if weight.dtype == torch.float32:
        for dtype in smaller:
            fewer = weight.to(dtype)
            if torch.equal(fewer.to(weight.dtype), weight):
                return fewer
    return weight


def _in_strips(weight: torch.Tensor, outputs: int, empty: Empty) -> torch.Tensor:
    """[strips, K * outputs] a copy of weights [N, K]; bfloat16 inputs lie in pairs."""
    together = 2 if weight.dtype == torch.bfloat16 else 1
    strips = _whole_strips(weight, outputs).view(
        -1, outputs, weight.shape[1] // together, together
    )
    return _copy(strips.transpose(1, 2), empty)


def _in_tiles(weight: torch.Tensor, empty: Empty) -> torch.Tensor:
    """[strips, K * outputs] a copy of weights [N, K]."""
    k = weight.shape[1]
    strips = _whole_strips(weight, 2 * _SIDE)
    tiles = strips.view(-1, 2, _SIDE, k // _DEPTH, _DEPTH // 2, 2)
    return _copy(tiles.permute(0, 3, 1, 4, 2, 5), empty)


def _for_now(count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count] that vLLM copies to where an earlier weight is, and drops."""
    return torch.empty(count, dtype=dtype)


def _copy(strips: torch.Tensor, empty: Empty) -> torch.Tensor:
    """[strips, K * outputs] a dense copy."""
    copy = empty(strips.numel(), strips.dtype)
    copy.view(strips.shape).copy_(strips)
    return copy.view(len(strips), -1)


def _whole_strips(weight: torch.Tensor, outputs: int) -> torch.Tensor:
    """Weights [N, K] with zeros behind the last output."""
    missing = -len(weight) % outputs
    # Padding copies, even by nothing.
    return nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


@cache
def _describe() -> None:
    """Tell torch.compile what comes out."""

    def output(x: torch.Tensor, *_: Any, outputs: int, **__: Any) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], outputs))

    for name in ("linear", "linear_in_tiles"):
        torch.library.register_fake(f"vllm_specinfer::{name}", output)
