"""Tree attention over vLLM's paged CPU cache: the C++ kernel and its definition.

Dimension legend: R requests, T query rows, H query heads, D head size, W words.
"""

import torch

from vllm_specinfer.attention.reference import attend_rows
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import page_layout
from vllm_specinfer.tree.rows import TreeRows


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    isa: str = "vec",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """Attend the tree rows of a step; other rows of `out` stay as they are.

    Args:
        query: [T, H, D].
        kv_cache: [B, Hkv, block_size, 2 * D], as vLLM hands it to layers: of the
            query's dtype, float8_e4m3fn or float8_e5m2.
        out: [T, H, D], written.
        block_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, KV positions written per request.
        tree: What each row sees.
        scale: Of the scores.
        softcap: Cap of the scores, 0 for none.
        sinks: [H] sink logits of any dtype.
        isa: `layer.isa`, which decides the cache's arrangement.
        k_scale: What the cache's K are to be multiplied by.
        v_scale: What its V are to be multiplied by.
        window: How many last positions of its path a row sees, 0 for all; at least 64
            for each word of `tree.ancestor_bits`.

    Raises:
        RuntimeError: An argument is not as above.
    """
    layout = page_layout(isa, kv_cache.dtype, kv_cache.shape[2], query.shape[2])
    kernels = extension.load() if layout.is_known else None
    if kernels is None:
        tree_attention_ref(
            *(query, kv_cache, out, block_table, query_start_loc, seq_lens, tree),
            *(scale, softcap, sinks, isa, k_scale, v_scale, window),
        )
        return
    kernels.tree_attention(
        *(query, kv_cache, out, block_table, query_start_loc, seq_lens),
        *(tree.is_tree, tree.context_lens, tree.ancestor_bits),
        *(scale, softcap, sinks, k_scale, v_scale, window, layout.in_tiles),
    )


def tree_attention_ref(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    isa: str = "vec",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    window: int = 0,
) -> None:
    """`tree_attention` in plain torch, float32 inside, for every cache layout."""
    block_size = kv_cache.shape[2]
    layout = page_layout(isa, kv_cache.dtype, block_size, query.shape[2])

    def keys_values(r: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = block_table[r, : -(-length // block_size)].long()
        pages = kv_cache[blocks].flatten(2)  # [blocks, Hkv, 2 * block_size * D]
        key, value = (
            pages[:, :, index].transpose(1, 2).flatten(0, 1)[:length]
            for index in (layout.key, layout.value)
        )
        return key.float() * k_scale, value.float() * v_scale

    attend_rows(
        *(query, keys_values, out, query_start_loc, seq_lens, tree),
        *(scale, softcap, sinks, window),
    )
