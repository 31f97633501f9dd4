"""Where vLLM's CPU cache keeps each K/V element of a token.

Dimension legend: B blocks, D head size.

A cache is [B, Hkv, block_size, 2 * D]; a page is one (block, KV head) of it. How a
page is laid out depends on the instruction set vLLM chose ("vec", "amx", ...), and
vLLM does not say how. So one page is written through vLLM's own operator and read.
"""

import logging
from dataclasses import dataclass
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)

_BASE = 128  # every integer below it is exact in bfloat16


@dataclass(frozen=True, eq=False)
class PageLayout:
    """Element offsets within one page of 2 * block_size * D elements.

    Attributes:
        key: [block_size, D] int64.
        value: [block_size, D] int64.
        is_plain: K is stored as [D, block_size], then V as [block_size, D]: the only
            layout that the C++ kernels read.
    """

    key: torch.Tensor
    value: torch.Tensor
    is_plain: bool


@lru_cache(maxsize=64)
def page_layout(
    isa: str, dtype: torch.dtype, block_size: int, head_size: int
) -> PageLayout:
    """Probe the layout of a page.

    Args:
        isa: vLLM's name of the instruction set, `layer.isa`.
        dtype: Of the cache; not quantized.
        block_size: Tokens per page.
        head_size: D.

    Raises:
        RuntimeError: If vLLM's operator is no permutation of the tokens' elements.
    """
    from vllm import _custom_ops as ops

    shape = (block_size, head_size)
    count = block_size * head_size
    slots = torch.arange(block_size)
    found = torch.zeros(2 * count, dtype=torch.int64)
    # Element numbers do not fit into 8 bits of mantissa: write them digit by digit.
    for digit in range(4):
        numbers = torch.arange(2 * count) // _BASE**digit % _BASE
        key, value = numbers.to(dtype).view(2, block_size, 1, head_size)
        page = torch.full((1, 1, *shape[:1], 2 * head_size), -1.0, dtype=dtype)
        key_page, value_page = page.view(1, 1, -1, head_size).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(key, value, key_page, value_page, slots, isa)
        found += page.flatten().long() * _BASE**digit
    offsets = torch.argsort(found)
    if not torch.equal(found[offsets], torch.arange(2 * count)):
        raise RuntimeError(
            f"vLLM's CPU cache of isa {isa!r} must hold each element once; got "
            f"another layout for {dtype}, block size {block_size}, head {head_size}"
        )
    key, value = offsets.view(2, *shape)
    plain = torch.arange(count)
    is_plain = torch.equal(key, plain.view(head_size, block_size).T) and torch.equal(
        value, plain.view(shape) + count
    )
    if not is_plain:
        logger.warning(
            "vLLM's CPU cache has the layout of isa %r: tree attention and the KV "
            "commit run in plain torch, which is slower",
            isa,
        )
    return PageLayout(key, value, is_plain)


def cache_layout(kv_cache: torch.Tensor) -> PageLayout:
    """The layout vLLM gives this cache, if its elements are not quantized.

    Args:
        kv_cache: [B, Hkv, block_size, 2 * D].
    """
    _, _, block_size, width = kv_cache.shape
    isa = _isa(kv_cache.dtype, block_size, width // 2)
    return page_layout(isa, kv_cache.dtype, block_size, width // 2)


@lru_cache(maxsize=64)
def _isa(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)
