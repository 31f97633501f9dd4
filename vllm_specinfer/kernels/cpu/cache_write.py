"""K and V of a step's few rows into vLLM's paged CPU cache, by one thread at once.

vLLM's own way makes views of the cache and wakes all threads, for every layer.
"""

import torch

from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import page_layout

# Rows up to which one thread has been measured to be sooner done.
MOST_ROWS = 64


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    isa: str,
) -> bool:
    """Write row i to slot i, as far as there are slots; negative ones are padding.

    Args:
        key: [T, Hkv, D].
        value: [T, Hkv, D].
        kv_cache: [B, Hkv, block_size, 2 * D].
        slot_mapping: [T] int64.
        isa: `layer.isa`, which decides the cache's arrangement.

    Returns:
        Whether it was done. Many rows, and caches of another dtype than the rows' or
        of an unknown arrangement, are left to vLLM
        (vllm/v1/attention/backends/cpu_attn.py, do_kv_cache_update).

    Raises:
        RuntimeError: A tensor is not as above, or a slot is behind the cache.
    """
    if len(slot_mapping) > MOST_ROWS or key.dtype != kv_cache.dtype:
        return False
    layout = page_layout(isa, kv_cache.dtype, kv_cache.shape[2], key.shape[2])
    kernels = extension.load() if layout.is_known else None
    if kernels is None:
        return False
    kernels.write_kv(key, value, kv_cache, slot_mapping, layout.in_tiles)
    return True
