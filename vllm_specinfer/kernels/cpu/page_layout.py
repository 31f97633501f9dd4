"""How vLLM's CPU cache arranges K and V inside one (block, KV head) page.

Dimension legend: B blocks, H KV heads, P positions per block, D head size.
The page belongs to the kernel that reads it (`layer.isa`), so the arrangement is
found by writing numbers through vLLM's own `cpu_attn_reshape_and_cache`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger

logger = init_logger(__name__)

# Columns of a tile that AMX multiplies.
_TILE = 16

# Every dtype of the cache holds integers below these exactly.
_DIGIT, _FP8_DIGIT = 128, 16


@dataclass(frozen=True)
class PageLayout:
    """Where item (position, channel) lies in a page of 2 * P * D items.

    Attributes:
        key: [P, D] int64 index of each K item.
        value: [P, D] int64 index of each V item.
        is_known: K is stored as [D, P], then V as [P, D]; the C++ kernels read only
            this, row by row or in tiles.
        in_tiles: Both in tiles of 16 columns, [D / 2, 16, 2] and [P / 2, 16, 2].
    """

    key: torch.Tensor
    value: torch.Tensor
    is_known: bool
    in_tiles: bool


@cache
def page_layout(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> PageLayout:
    """Probe one arrangement.

    Args:
        isa: vLLM's kernel name, `layer.isa`.
        dtype: Of the cache. One of eight bits is probed as e4m3.
        block_size: P.
        head_size: D.

    Returns:
        The index tables.

    Raises:
        RuntimeError: The page is no permutation of its items.
    """
    half = block_size * head_size
    numbers = torch.arange(2 * half).view(2, block_size, 1, head_size)
    where = torch.zeros(2 * half, dtype=torch.int64)
    is_fp8 = dtype.itemsize == 1
    digit = _FP8_DIGIT if is_fp8 else _DIGIT
    # vLLM takes and leaves fp8 as bytes, and rounds numbers of a model's dtype to it.
    model_dtype, cache_dtype, kv_cache_dtype = (
        (torch.bfloat16, torch.uint8, "fp8_e4m3") if is_fp8 else (dtype, dtype, "auto")
    )
    scale = 1
    while scale < 2 * half:
        digits = (numbers // scale % digit).to(model_dtype)
        kv_cache = torch.zeros(1, 1, 2 * block_size, head_size, dtype=cache_dtype)
        key_cache, value_cache = kv_cache.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            *(digits[0], digits[1], key_cache, value_cache),
            torch.arange(block_size),
            isa,
            kv_cache_dtype=kv_cache_dtype,
        )
        stored = kv_cache.view(torch.float8_e4m3fn) if is_fp8 else kv_cache
        where += stored.float().flatten().long() * scale
        scale *= digit
    index = torch.argsort(where)
    if not torch.equal(where[index], torch.arange(2 * half)):
        raise RuntimeError(
            f"a KV page of isa {isa} must hold every item once; got another "
            f"arrangement for {dtype}, block size {block_size}, head {head_size}"
        )
    key, value = index.view(2, block_size, head_size)
    shapes = (head_size, block_size), (block_size, head_size)

    def lies(place: Callable[[int, int], torch.Tensor]) -> bool:
        of_key, of_value = (place(n, m) for n, m in shapes)
        return torch.equal(key, of_key.T) and torch.equal(value, of_value + half)

    in_tiles = lies(_in_tiles)
    if in_tiles:
        torch.cpu._init_amx()  # the kernels take the permission for granted
    is_known = in_tiles or lies(lambda n, m: torch.arange(n * m).view(n, m))
    if not is_known:
        logger.warning(
            "The C++ kernels of specinfer do not know the KV layout of isa %s: tree "
            "attention and the KV commit run in plain torch, which is slower.",
            isa,
        )
    return PageLayout(key, value, is_known, in_tiles)


def _in_tiles(n: int, m: int) -> torch.Tensor:
    """[n, m] where a matrix has its items if it lies in tiles."""
    tiles = torch.arange(n * m).view(m // _TILE, n // 2, _TILE, 2)
    return tiles.permute(1, 3, 0, 2).reshape(n, m)
