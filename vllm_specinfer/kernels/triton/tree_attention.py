"""Tree attention over vLLM's paged KV cache on a GPU.

One program attends a block of rows of one request with all query heads of one KV head,
so that they share its K/V tiles: first the tiles of the context, which every row sees,
then those of the nodes, masked by the rows' ancestor bits. Where blocks of rows are too
few to fill the device, the KV positions are split over programs and a second kernel
joins their partial softmaxes. How many blocks there are is the device's to know: a
graph is captured for the most that its rows may make, and splits as those of the step
need it.

Dimension legend: R requests, T query rows, H query heads, D head size, W words.
"""

import torch
import triton
import triton.language as tl

from vllm_specinfer.kernels.triton.row_blocks import RowBlocks
from vllm_specinfer.kernels.triton.splits import (
    MAX_SPLITS,
    MIN_TILES_PER_SPLIT,
    join_splits_kernel,
    num_splits,
    tile_bounds,
    tiles_per_split,
)
from vllm_specinfer.kernels.triton.tiles import (
    choose_num_programs,
    num_stages,
    tile_shape,
)
from vllm_specinfer.tree.rows import TreeRows
from vllm_specinfer.tree.token_tree import WORD_BITS


@triton.jit
def _attend_tile(
    acc,
    top,
    total,
    query,
    position,
    inside,
    seen,
    visible,
    pages_ptr,
    block,
    cache_stride_block,
    cache_stride_position,
    scale,
    softcap,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax."""
    d = tl.arange(0, HEAD_PADDED)
    channel = d < HEAD_SIZE
    at = block.to(tl.int64) * cache_stride_block
    at += (position % BLOCK_SIZE) * cache_stride_position
    key = tl.load(
        pages_ptr + at[None, :] + d[:, None],
        mask=channel[:, None] & inside[None, :],
        other=0.0,
    ).to(query.dtype)
    scores = tl.dot(query, key, input_precision=PRECISION) * scale
    if SOFTCAP:
        # tanh(x) without an overflow: 1 - 2 / (exp(2x) + 1)
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Rows that have seen nothing yet have no maximum to subtract.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - shift[:, None])
    shrink = tl.exp(top - shift)
    value = tl.load(
        pages_ptr + HEAD_SIZE + at[:, None] + d[None, :],
        mask=seen[:, None] & channel[None, :],
        other=0.0,
    ).to(query.dtype)
    acc = acc * shrink[:, None]
    acc += tl.dot(weights.to(query.dtype), value, input_precision=PRECISION)
    return acc, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["num_programs"])
def _tree_attention_kernel(
    out_ptr,
    partial_ptr,
    moments_ptr,
    query_ptr,
    kv_cache_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    is_tree_ptr,
    context_lens_ptr,
    bits_ptr,
    requests_ptr,
    places_ptr,
    count_ptr,
    sinks_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,
    softcap,
    num_programs,
    query_stride_row: tl.int64,
    query_stride_head: tl.int64,
    out_stride_row: tl.int64,
    out_stride_head: tl.int64,
    cache_stride_block: tl.int64,
    cache_stride_head: tl.int64,
    cache_stride_position: tl.int64,
    block_table_stride: tl.int64,
    bits_stride: tl.int64,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SCALES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TILES_PER_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    count = tl.load(count_ptr)
    splits = num_splits(count, num_programs, MAX_SPLITS)
    block_of_rows = tl.program_id(0) // splits
    if block_of_rows >= count:
        return
    r = tl.load(requests_ptr + block_of_rows)
    row_block = tl.load(places_ptr + block_of_rows)
    kv_head = tl.program_id(1)
    is_tree = tl.load(is_tree_ptr + r)
    first_row = tl.load(query_start_loc_ptr + r)
    num_rows = tl.load(query_start_loc_ptr + r + 1) - first_row
    seq_len = tl.load(seq_lens_ptr + r)
    if row_block * ROWS >= num_rows:
        return
    context = tl.load(context_lens_ptr + r)
    context = tl.where(is_tree, context, tl.maximum(seq_len - num_rows, 0))

    first, of_context, end = tile_bounds(context, seq_len, TILE, NUM_WORDS, WINDOW)
    split = tl.program_id(0) % splits
    per_split = tiles_per_split(end - first, splits, MIN_TILES_PER_SPLIT)
    alone = per_split >= end - first
    first += split * per_split
    end = tl.minimum(first + per_split, end)
    if (split > 0) & (first >= end):
        return

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_PADDED)
    row = row_block * ROWS + m // GROUP
    head = kv_head * GROUP + m % GROUP
    real = (m < ROWS * GROUP) & (row < num_rows)
    flat_row = (first_row + row).to(tl.int64)
    inside_head = real[:, None] & (d < HEAD_SIZE)[None, :]
    query = tl.load(
        query_ptr
        + (flat_row * query_stride_row + head * query_stride_head)[:, None]
        + d[None, :],
        mask=inside_head,
        other=0.0,
    )
    if SCALES:
        scale *= tl.load(k_scale_ptr)
    if WINDOW > 0:
        # A path has as many bits as positions, whatever their places.
        last = tl.zeros([BLOCK_M], tl.int32)
        for w in tl.static_range(NUM_WORDS):
            path = tl.load(bits_ptr + flat_row * bits_stride + w, mask=real, other=0)
            each = (path[:, None] >> tl.arange(0, 64).to(tl.int64)[None, :]) & 1
            last += tl.sum(each, 1).to(tl.int32)
        last = tl.where(is_tree, last, row + 1)
        oldest = context + last - WINDOW

    acc = tl.zeros([BLOCK_M, HEAD_PADDED], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32)
        total += tl.where(alone, 1.0, 0.0)  # else the join counts it
    pages_ptr = kv_cache_ptr + kv_head * cache_stride_head
    blocks_ptr = block_table_ptr + r * block_table_stride
    t = tl.arange(0, TILE)
    # Known a tile ahead, so that K and V can be loaded while others are used.
    ahead = first * TILE + t
    following = tl.load(blocks_ptr + ahead // BLOCK_SIZE, mask=ahead < context, other=0)
    for tile in range(first, tl.minimum(end, of_context)):
        position = tile * TILE + t
        block = following
        ahead = position + TILE
        following = tl.load(
            blocks_ptr + ahead // BLOCK_SIZE, mask=ahead < context, other=0
        )
        inside = position < context
        visible = inside[None, :]
        if WINDOW > 0:  # what left the window may be anything
            inside = inside & (position > context - WINDOW)
            visible = inside[None, :] & (position[None, :] >= oldest[:, None])
        acc, top, total = _attend_tile(
            acc,
            top,
            total,
            query,
            position,
            inside,
            inside,
            visible,
            pages_ptr,
            block,
            cache_stride_block,
            cache_stride_position,
            scale,
            softcap,
            BLOCK_SIZE,
            HEAD_SIZE,
            HEAD_PADDED,
            SOFTCAP,
            PRECISION,
        )
    for tile in range(tl.maximum(first, of_context), end):
        node = (tile - of_context) * TILE + t
        position = context + node
        inside = position < seq_len
        # TILE divides 64, so a tile of nodes lies in one word.
        word = (tile - of_context) * TILE // 64
        bits = tl.load(
            bits_ptr + flat_row * bits_stride + word,
            mask=real,
            other=0,
        )
        visible = ((bits[:, None] >> (node % 64).to(tl.int64)[None, :]) & 1) != 0
        visible = tl.where(is_tree, visible, node[None, :] <= row[:, None])
        visible = visible & inside[None, :]
        # Slots that nothing was written to may hold what is no number.
        seen = tl.max(visible.to(tl.int32), 0) > 0
        block = tl.load(blocks_ptr + position // BLOCK_SIZE, mask=inside, other=0)
        acc, top, total = _attend_tile(
            acc,
            top,
            total,
            query,
            position,
            inside,
            seen,
            visible,
            pages_ptr,
            block,
            cache_stride_block,
            cache_stride_position,
            scale,
            softcap,
            BLOCK_SIZE,
            HEAD_SIZE,
            HEAD_PADDED,
            SOFTCAP,
            PRECISION,
        )

    if SCALES:
        acc *= tl.load(v_scale_ptr)
    if not alone:
        program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head
        part = program * BLOCK_M + m
        tl.store(
            partial_ptr + part[:, None] * HEAD_PADDED + d[None, :],
            acc,
            mask=real[:, None],
        )
        tl.store(moments_ptr + part * 2, top, mask=real)
        tl.store(moments_ptr + part * 2 + 1, total, mask=real)
        return
    # Only a row that sees nothing has no weight; it gets zeros.
    attended = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr
        + (flat_row * out_stride_row + head * out_stride_head)[:, None]
        + d[None, :],
        attended.to(out_ptr.dtype.element_ty),
        mask=inside_head,
    )


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
    *,
    max_query_len: int,
    row_blocks: RowBlocks,
    window: int = 0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_programs: int | None = None,
) -> None:
    """Attend the rows of some blocks; other rows of `out` stay as they are.

    Those of requests that have no tree are causal ones at their last positions.

    Args:
        query: [T, H, D], float32, bfloat16 or float16; rows beyond the last request
            are padding.
        kv_cache: [B, Hkv, block_size, 2 * D] as vLLM hands it to layers, K before V;
            of the query's type or float8.
        out: [T, H, D], written.
        block_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32; a request without rows is padding.
        seq_lens: [R] int32, KV positions written per request.
        tree: What each row sees; a request has at most 64 * W rows.
        scale: Of the scores.
        softcap: Cap of the scores, 0 for none.
        sinks: [H] sink logits.
        max_query_len: Upper bound of a request's rows, or what tiles are made for.
        row_blocks: Which rows; of `rows_per_block` each, with room for no more blocks
            than there may be.
        window: How many last positions of its path a row sees, 0 for all; at least
            64 * W, so that it never ends among the nodes.
        k_scale: [1] or scalar float32, which K is to be multiplied with.
        v_scale: The same for V; given with `k_scale` or not at all.
        num_programs: Of a KV head, so many fill the device: fewer blocks of rows share
            them; by default `choose_num_programs`.
    """
    num_reqs, num_kv_heads = len(seq_lens), kv_cache.shape[1]
    head_size, num_words = query.shape[2], tree.ancestor_bits.shape[1]
    if num_reqs == 0:
        return
    group = query.shape[1] // num_kv_heads
    head_padded = triton.next_power_of_2(head_size)
    max_rows = min(max_query_len, num_words * WORD_BITS)
    block_m, tile = tile_shape(
        max_rows * group, group, head_padded, query.element_size()
    )
    rows = block_m // group
    most_blocks = len(row_blocks.requests)
    if num_programs is None:
        num_programs = choose_num_programs(num_kv_heads, query.device)
    parts = num_programs, num_kv_heads, block_m
    partial = query.new_empty(*parts, head_padded, dtype=torch.float32)
    moments = query.new_empty(*parts, 2, dtype=torch.float32)
    shape = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": head_padded,
        "BLOCK_M": block_m,
        "TILE": tile,
        "NUM_WORDS": num_words,
        "WINDOW": window,
        "SINKS": sinks is not None,
        "MAX_SPLITS": MAX_SPLITS,
        "MIN_TILES_PER_SPLIT": MIN_TILES_PER_SPLIT,
    }
    blocks = row_blocks.requests, row_blocks.places, row_blocks.count
    _tree_attention_kernel[(max(most_blocks, num_programs), num_kv_heads)](
        out,
        partial,
        moments,
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        tree.is_tree,
        tree.context_lens,
        tree.ancestor_bits,
        *blocks,
        sinks,
        k_scale,
        v_scale,
        scale,
        softcap,
        num_programs,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        block_table.stride(0),
        tree.ancestor_bits.stride(0),
        **shape,
        BLOCK_SIZE=kv_cache.shape[2],
        SOFTCAP=softcap > 0,
        SCALES=k_scale is not None,
        # TF32 would lose what float32 is chosen for.
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8 if block_m >= 128 else 4,
        num_stages=num_stages(head_padded, query.element_size()),
    )
    if num_programs > 1:
        # More blocks than these are not split.
        splittable = min(most_blocks, num_programs // 2)
        most_rows = min(len(query), splittable * rows)
        join_splits_kernel[(most_rows, query.shape[1])](
            out,
            partial,
            moments,
            query_start_loc,
            seq_lens,
            tree.is_tree,
            tree.context_lens,
            *blocks,
            sinks,
            num_programs,
            out.stride(0),
            out.stride(1),
            **shape,
            MAX_BLOCKS=triton.next_power_of_2(max(num_programs // 2, 1)),
        )
