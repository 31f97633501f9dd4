"""Programs that share a block of rows of tree attention, and their join.

Each attends some tiles of the KV positions and leaves a partial softmax: the weighted
sum of V, its largest score and its total (`tree_attention.py`). How many share a block
is known on the device only, which also knows how many blocks there are.
"""

import triton
import triton.language as tl

MAX_SPLITS = 32
MIN_TILES_PER_SPLIT = 4


@triton.jit
def tile_bounds(
    context,
    seq_len,
    TILE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """First tile, tiles of the context, and end: nodes start a tile of their own."""
    num_nodes = tl.minimum(seq_len - context, NUM_WORDS * 64)
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW + 1, 0) // TILE
    of_context = tl.cdiv(context, TILE)
    return first, of_context, of_context + tl.cdiv(num_nodes, TILE)


@triton.jit
def tiles_per_split(num_tiles, splits, MIN_TILES_PER_SPLIT: tl.constexpr):
    return tl.maximum(tl.cdiv(num_tiles, splits), MIN_TILES_PER_SPLIT)


@triton.jit
def num_splits(count, num_programs, MAX_SPLITS: tl.constexpr):
    """How many programs of a KV head share a block of rows."""
    splits = num_programs // tl.maximum(count, 1)
    return tl.maximum(tl.minimum(splits, MAX_SPLITS), 1)


@triton.jit(do_not_specialize=["num_programs"])
def join_splits_kernel(
    out_ptr,
    partial_ptr,
    moments_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    is_tree_ptr,
    context_lens_ptr,
    requests_ptr,
    places_ptr,
    count_ptr,
    sinks_ptr,
    num_programs,
    out_stride_row: tl.int64,
    out_stride_head: tl.int64,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIN_TILES_PER_SPLIT: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):
    """One query head of one row: the programs count the rows of all blocks."""
    ROWS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    count = tl.load(count_ptr)
    splits = num_splits(count, num_programs, MAX_SPLITS)
    if splits == 1:
        return
    b = tl.arange(0, MAX_BLOCKS)
    requests = tl.load(requests_ptr + b, mask=b < count, other=0)
    places = tl.load(places_ptr + b, mask=b < count, other=0)
    ends = tl.load(query_start_loc_ptr + requests + 1)
    rows = ends - tl.load(query_start_loc_ptr + requests) - places * ROWS
    rows = tl.where(b < count, tl.minimum(tl.maximum(rows, 0), ROWS), 0)
    ends = tl.cumsum(rows, 0)
    before = ends <= tl.program_id(0)
    block_of_rows = tl.sum(before.to(tl.int32), 0)
    if block_of_rows >= count:
        return
    row = tl.program_id(0) - tl.max(tl.where(before, ends, 0), 0)
    m = row * GROUP + head % GROUP
    r = tl.load(requests_ptr + block_of_rows)
    is_tree = tl.load(is_tree_ptr + r)
    first_row = tl.load(query_start_loc_ptr + r)
    num_rows = tl.load(query_start_loc_ptr + r + 1) - first_row
    row += tl.load(places_ptr + block_of_rows) * ROWS
    seq_len = tl.load(seq_lens_ptr + r)
    context = tl.load(context_lens_ptr + r)
    context = tl.where(is_tree, context, tl.maximum(seq_len - num_rows, 0))

    first, _, end = tile_bounds(context, seq_len, TILE, NUM_WORDS, WINDOW)
    per_split = tiles_per_split(end - first, splits, MIN_TILES_PER_SPLIT)
    if per_split >= end - first:
        return
    split = tl.arange(0, MAX_SPLITS)
    # Splits beyond the last tile have written nothing.
    written = first + split * per_split < end
    program = (block_of_rows * splits + split).to(tl.int64)
    part = (program * tl.num_programs(1) + head) // GROUP * BLOCK_M + m
    top = tl.load(moments_ptr + part * 2, mask=written, other=float("-inf"))
    totals = tl.load(moments_ptr + part * 2 + 1, mask=written, other=0.0)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    shrink = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(totals * shrink, 0)
    if SINKS:
        total += tl.exp(sink - highest)
    d = tl.arange(0, HEAD_PADDED)
    partial = tl.load(
        partial_ptr + part[:, None] * HEAD_PADDED + d[None, :],
        mask=written[:, None] & (d < HEAD_SIZE)[None, :],
        other=0.0,
    )
    attended = tl.sum(partial * shrink[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    out_row = (first_row + row).to(tl.int64)
    tl.store(
        out_ptr + out_row * out_stride_row + head * out_stride_head + d,
        attended.to(out_ptr.dtype.element_ty),
        mask=d < HEAD_SIZE,
    )
