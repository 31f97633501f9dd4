"""Moving K/V between slots of vLLM's paged CPU cache.

Dimension legend: L layers, M moves, B blocks, D head size. A slot is
block * block_size + offset.
"""

from collections.abc import Sequence

import torch

from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.layout import PageLayout


def move_kv(
    kv_caches: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    block_size: int,
    layouts: Sequence[PageLayout],
) -> None:
    """Copy K/V of slot src[i] to slot dst[i] in every cache, as if all at once.

    Args:
        kv_caches: L of [B, Hkv, block_size, 2 * D]; pages are contiguous. D, Hkv and
            dtype may differ; tensors that share memory are moved once.
        src_slots: [M] int64; negative slots are skipped.
        dst_slots: [M] int64, each at most once; negative slots are skipped.
        block_size: Tokens per block.
        layouts: L page layouts.
    """
    kernels = extension.load() if all(x.is_plain for x in layouts) else None
    if kernels is None:
        move_kv_ref(kv_caches, src_slots, dst_slots, block_size, layouts)
    else:
        kernels.commit_kv(kv_caches, src_slots, dst_slots, block_size)


def move_kv_ref(
    kv_caches: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    block_size: int,
    layouts: Sequence[PageLayout],
) -> None:
    """`move_kv` in plain torch, for any layout."""
    moved = (src_slots != dst_slots) & (src_slots >= 0) & (dst_slots >= 0)
    src, dst = src_slots[moved], dst_slots[moved]
    src_block, src_offset = src // block_size, src % block_size
    dst_block, dst_offset = dst // block_size, dst % block_size
    seen: set[int] = set()
    for cache, layout in zip(kv_caches, layouts, strict=True):
        if cache.data_ptr() in seen:
            continue
        seen.add(cache.data_ptr())
        pages = cache.view(*cache.shape[:2], -1)  # [B, Hkv, 2 * block_size * D]
        heads = torch.arange(cache.shape[1]).view(1, -1, 1)
        elements = torch.cat([layout.key, layout.value], dim=1)  # [block_size, 2 * D]
        old = pages[src_block.view(-1, 1, 1), heads, elements[src_offset].unsqueeze(1)]
        pages[dst_block.view(-1, 1, 1), heads, elements[dst_offset].unsqueeze(1)] = old
