"""Tree attention over vLLM's paged CPU cache: the C++ kernel and its definition.

Dimension legend: R requests, T query rows, H query heads, D head size, W words.
"""

import torch

from vllm_specinfer.attention.metadata import TreeRows
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import page_layout


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
) -> None:
    """Attend the tree rows of a step; other rows of `out` stay as they are.

    Args:
        query: [T, H, D].
        kv_cache: [B, Hkv, block_size, 2 * D], as vLLM hands it to layers.
        out: [T, H, D], written.
        block_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32, KV positions written per request.
        tree: What each row sees.
        scale: Of the scores.
        softcap: Cap of the scores, 0 for none.
        sinks: [H] float32 sink logits.
        isa: `layer.isa`, which decides the cache's arrangement.
    """
    layout = page_layout(isa, kv_cache.dtype, kv_cache.shape[2], query.shape[2])
    kernels = extension.load() if layout.is_plain else None
    if kernels is None:
        tree_attention_ref(
            query,
            kv_cache,
            out,
            block_table,
            query_start_loc,
            seq_lens,
            tree,
            scale,
            softcap,
            sinks,
            isa,
        )
        return
    kernels.tree_attention(
        query,
        kv_cache,
        out,
        block_table,
        query_start_loc,
        seq_lens,
        tree.is_tree,
        tree.context_lens,
        tree.ancestor_bits,
        scale,
        softcap,
        sinks,
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
) -> None:
    """`tree_attention` in plain torch, float32 inside, for every cache layout."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    head_size = query.shape[2]
    layout = page_layout(isa, kv_cache.dtype, block_size, head_size)
    for r in torch.nonzero(tree.is_tree)[:, 0].tolist():
        start, end = query_start_loc[r : r + 2].tolist()
        length, context = int(seq_lens[r]), int(tree.context_lens[r])
        if start == end:
            continue
        blocks = block_table[r, : -(-length // block_size)].long()
        pages = kv_cache[blocks].flatten(2)  # [blocks, Hkv, 2 * block_size * D]
        key, value = (
            pages[:, :, index].transpose(1, 2).flatten(0, 1)[:length].float()
            for index in (layout.key, layout.value)
        )
        q = query[start:end].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->qhgk", q, key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        position = torch.arange(length - context)
        words = tree.ancestor_bits[start:end, position // 64]
        visible = torch.ones(end - start, length, dtype=torch.bool)
        visible[:, context:] = (words >> (position % 64)) & 1 == 1
        scores.masked_fill_(~visible[:, None, None], -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, num_kv_heads, -1, 1)
            scores = torch.cat([scores, sink.expand(len(q), -1, -1, -1)], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        attended = torch.einsum("qhgk,khd->qhgd", weights, value)
        out[start:end] = attended.flatten(1, 2).to(out.dtype)
