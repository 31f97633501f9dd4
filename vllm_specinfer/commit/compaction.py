"""K/V commit on a CPU: the accepted path moves to consecutive slots in every layer.

Dimension legend: L layers, M moved tokens, P positions per block.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from vllm_specinfer.device import as_array, stage
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import PageLayout, page_layout

# Copies the K/V of slot src[i] to slot dst[i]; all are read before any is written.
# src: [M] int64; moves onto themselves or with a negative slot (padding) are skipped.
# dst: [M] int64, distinct.
Move = Callable[[torch.Tensor, torch.Tensor], None]


class CPUCommit:
    """Of the layers of one KV cache group, whose caches vLLM's CPU kernels arrange."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Serve these layers, at least one; their caches stay where they are."""
        caches = [layer.kv_cache for layer in layers]
        self._move = mover(caches, [layer.isa for layer in layers])

    def __call__(
        self,
        slot_mapping: torch.Tensor,
        roots: Sequence[int],
        paths: Sequence[Sequence[int]],
    ) -> None:
        """Move the K/V of accepted rows to the slots right after their root.

        Args:
            slot_mapping: [T] int64 the step's slots in that group.
            roots: Flat row of each request's root.
            paths: Of each request the accepted rows, counted from its root, from depth
                1 down, rising.
        """
        sources, targets = [], []
        for root, path in zip(roots, paths, strict=True):
            for depth, row in enumerate(path, start=1):
                if row != depth:
                    sources.append(root + row)
                    targets.append(root + depth)
        if not sources:
            return
        slots = as_array(slot_mapping)
        self._move(*stage(slot_mapping.device, slots[sources], slots[targets]))


def mover(kv_caches: Sequence[torch.Tensor], isas: Sequence[str]) -> Move:
    """What moves K/V in these caches.

    Args:
        kv_caches: L > 0 tensors [B, Hkv, P, 2 * D] as vLLM hands them to layers; Hkv
            and D may differ, and a tensor that layers share is moved once.
        isas: L times `layer.isa`, which decides a cache's arrangement.

    Raises:
        ValueError: The caches have more than one P.
    """
    block_size = kv_caches[0].shape[2]
    for cache in kv_caches:
        if cache.shape[2] != block_size:
            raise ValueError(
                f"KV caches must share a block size; got {block_size} and "
                f"{cache.shape[2]}"
            )
    layouts = list(map(_layout, kv_caches, isas))
    known = all(layout.is_known for layout in layouts)
    kernels = extension.load() if known else None
    if kernels is None:
        return lambda src, dst: commit_kv_ref(kv_caches, src, dst, isas)
    in_tiles = [layout.in_tiles for layout in layouts]
    return lambda src, dst: kernels.commit_kv(kv_caches, src, dst, block_size, in_tiles)


def commit_kv_ref(
    kv_caches: Sequence[torch.Tensor],
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    isas: Sequence[str],
) -> None:
    """A `Move` in plain torch, for every cache layout."""
    real = (src_slots >= 0) & (dst_slots >= 0)
    src_slots, dst_slots = src_slots[real], dst_slots[real]
    distinct = {cache.data_ptr(): i for i, cache in enumerate(kv_caches)}.values()
    for kv_cache, isa in ((kv_caches[i], isas[i]) for i in distinct):
        block_size = kv_cache.shape[2]
        layout = _layout(kv_cache, isa)
        # [P, 2 * D]: every item of one position, K and V.
        items = torch.cat([layout.key, layout.value], dim=1)
        pages = kv_cache.view(*kv_cache.shape[:2], -1)
        heads = torch.arange(kv_cache.shape[1])[None, :, None]
        src = (src_slots // block_size)[:, None, None]
        dst = (dst_slots // block_size)[:, None, None]
        moved = pages[src, heads, items[src_slots % block_size][:, None]].clone()
        pages[dst, heads, items[dst_slots % block_size][:, None]] = moved


def _layout(kv_cache: torch.Tensor, isa: str) -> PageLayout:
    _, _, block_size, width = kv_cache.shape
    return page_layout(isa, kv_cache.dtype, block_size, width // 2)
