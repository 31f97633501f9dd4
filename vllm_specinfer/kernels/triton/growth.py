"""Levels of trees that grow on the device, a program for each request.

Definition: `TreeGrowth`.

Dimension legend: R requests, F nodes of a level per request, K children of each, C
candidates per request, W 64-bit words per bit row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.drafting.graphs import PassRows

# Candidates that are compared at once, and with how many.
MOST_COMPARED, OTHERS = 64, 64
# Elements of a program's tile, and children that one adds.
MOST_ELEMENTS, MOST_CHILDREN = 8192, 1024


class Paged(NamedTuple):
    """Where K/V of R requests lies.

    Attributes:
        table: [S, B] int32 blocks of all slots.
        block_size: Positions of one.
        slots: [R] int64 slots of the requests.
        limits: [R] int64 positions that each may write to.
        context: [R] int64 positions before its nodes.
        roots: [R] int64 positions of the roots.
        max_model_len: No text is longer.
    """

    table: torch.Tensor
    block_size: int
    slots: torch.Tensor
    limits: torch.Tensor
    context: torch.Tensor
    roots: torch.Tensor
    max_model_len: int


@triton.jit(do_not_specialize=["width", "start", "size", "k"])
def _extend_kernel(
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    logprobs_ptr,
    children_ptr,
    columns_ptr,
    is_node_ptr,
    above_ptr,
    correction_ptr,
    width,
    start,
    size,
    k,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    child = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = child < size * k
    row = r * size + child // k
    is_node = tl.load(is_node_ptr + row, mask=inside, other=0) != 0
    at = r * size * k + child
    score = tl.load(logprobs_ptr + at, mask=inside & is_node, other=float("-inf"))
    score = score * tl.load(correction_ptr) - tl.load(correction_ptr + 1)
    score += tl.load(above_ptr + row, mask=inside & is_node, other=0.0)
    to = r * width + start + child
    is_child = is_node & (score == score)  # NaN would be ranked with the best one
    tl.store(scores_ptr + to, tl.where(is_child, score, float("-inf")), mask=inside)
    token = tl.load(children_ptr + at, mask=inside, other=0)
    tl.store(tokens_ptr + to, token, mask=inside)
    column = tl.load(columns_ptr + row, mask=inside, other=0)
    tl.store(parents_ptr + to, column.to(tl.int32), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("width", "first", "end", "num_new", "size", "size_above", "k", "depth"),
        *("num_nodes", "table_width", "table_stride", "block_size", "max_model_len"),
    ]
)
def _expand_kernel(
    scores_ptr,
    tokens_ptr,
    used_above_ptr,
    bits_above_ptr,
    columns_ptr,
    is_node_ptr,
    parents_ptr,
    level_scores_ptr,
    scratch_ptr,
    bits_ptr,
    used_ptr,
    slots_ptr,
    limits_ptr,
    context_ptr,
    roots_ptr,
    table_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    row_tokens_ptr,
    positions_ptr,
    kv_slots_ptr,
    context_lens_ptr,
    row_bits_ptr,
    width,
    first,
    end,
    num_new,
    size,
    size_above,
    k,
    depth,
    num_nodes,
    table_width,
    table_stride,
    block_size,
    max_model_len,
    NUM_WORDS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    BEST_FIRST: tl.constexpr,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    all_ptr = scores_ptr + r * width
    new_ptr = all_ptr + first
    n = tl.arange(0, SIZE_PADDED)
    order = tl.zeros([SIZE_PADDED], tl.int64)
    lives = tl.zeros([SIZE_PADDED], tl.int32)
    score = tl.full([SIZE_PADDED], float("-inf"), tl.float32)
    for begin in range(0, num_new, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        of_i = tl.load(new_ptr + i, mask=i < num_new, other=float("-inf"))
        live = of_i > float("-inf")
        place = i
        if BEST_FIRST:
            place = tl.zeros([BLOCK], tl.int32)
            for other in range(0, num_new, OTHERS):
                j = other + tl.arange(0, OTHERS)
                of_j = tl.load(new_ptr + j, mask=j < num_new, other=float("-inf"))
                before = of_j[None, :] > of_i[:, None]
                same = of_j[None, :] == of_i[:, None]
                before = before | (same & (j[None, :] < i[:, None]))
                before = before & (j[None, :] < num_new)
                place += tl.sum(before.to(tl.int32), 1)
            better = tl.zeros([BLOCK], tl.int32)
            for other in range(0, end, OTHERS):
                j = other + tl.arange(0, OTHERS)
                of_j = tl.load(all_ptr + j, mask=j < end, other=float("-inf"))
                better += tl.sum((of_j[None, :] > of_i[:, None]).to(tl.int32), 1)
            live = live & (better < num_nodes)
        here = (place[None, :] == n[:, None]) & (i < num_new)[None, :]
        order += tl.sum(tl.where(here, i[None, :], 0), 1)
        lives += tl.sum((here & live[None, :]).to(tl.int32), 1)
        of_place = tl.max(tl.where(here, of_i[None, :], float("-inf")), 1)
        score = tl.maximum(score, of_place)

    inside = n < size
    context = tl.load(context_ptr + r)
    deepest = max_model_len - 1 - tl.load(roots_ptr + r)
    is_node = inside & (lives > 0) & (deepest >= depth)
    used = tl.load(used_above_ptr + r)
    scratch = used + tl.cumsum(is_node.to(tl.int64), 0) - 1
    is_node = is_node & (scratch < tl.load(limits_ptr + r) - context)
    used += tl.sum(is_node.to(tl.int64), 0)
    parent = order // k
    at = r * size + n
    tl.store(columns_ptr + at, first + order, mask=inside)
    tl.store(is_node_ptr + at, is_node, mask=inside)
    tl.store(parents_ptr + at, parent, mask=inside)
    tl.store(level_scores_ptr + at, score, mask=inside)
    tl.store(scratch_ptr + at, scratch, mask=inside)
    tl.store(used_ptr + r, used)
    for w in tl.static_range(NUM_WORDS):
        from_ptr = bits_above_ptr + (r * size_above + parent) * NUM_WORDS + w
        above = tl.load(from_ptr, mask=inside, other=0)
        own = scratch - 64 * w
        bit = (own * 0 + 1) << tl.minimum(tl.maximum(own, 0), 63)
        bits = above | tl.where((own >= 0) & (own < 64), bit, 0)
        bits = tl.where(is_node, bits, 0)
        tl.store(bits_ptr + at * NUM_WORDS + w, bits, mask=inside)
        tl.store(row_bits_ptr + at * NUM_WORDS + w, bits, mask=inside)

    slot = tl.load(slots_ptr + r)
    flat = context + tl.maximum(scratch, 0)
    block = tl.minimum(flat // block_size, table_width - 1)
    block = tl.load(table_ptr + slot * table_stride + block, mask=inside, other=0)
    kv_slot = block.to(tl.int64) * block_size + flat % block_size
    tl.store(kv_slots_ptr + at, tl.where(is_node, kv_slot, PAD_SLOT), mask=inside)
    token = tl.load(tokens_ptr + r * width + first + order, mask=is_node, other=0)
    tl.store(row_tokens_ptr + at, token.to(tl.int32), mask=inside)
    # A node's position id is its depth, not its scratch slot.
    position = tl.maximum(tl.minimum(context - 1 + depth, max_model_len - 1), 0)
    tl.store(positions_ptr + at, position + n * 0, mask=inside)
    tl.store(row_slots_ptr + r, slot)
    tl.store(seq_lens_ptr + r, (context + used).to(tl.int32))
    tl.store(context_lens_ptr + r, context.to(tl.int32))


def extend(
    growth: DeviceGrowth,
    depth: int,
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    correction: torch.Tensor,
) -> None:
    """Add the children of the nodes at a depth.

    Args:
        growth: Of R trees.
        depth: Of the nodes.
        logprobs: [R * F, K] float32 log-probability of each child given its parent's
            path; -inf where there is none. Rows of no node do not count.
        tokens: [R * F, K] int64, distinct within a row where there is a child.
        correction: [2] float32: a factor of `logprobs`, and what is taken off then.
    """
    level, k = growth.levels[depth], growth.num_children[depth]
    num_reqs, size = level.columns.shape
    block = min(MOST_CHILDREN, triton.next_power_of_2(size * k))
    _extend_kernel[(num_reqs, triton.cdiv(size * k, block))](
        growth.scores,
        growth.tokens,
        growth.parents,
        logprobs,
        tokens,
        level.columns,
        level.is_node,
        level.scores,
        correction,
        growth.scores.shape[1],
        growth.starts[depth],
        size,
        k,
        BLOCK=block,
    )


def expand(growth: DeviceGrowth, depth: int, paged: Paged, rows: PassRows) -> None:
    """Choose the nodes of a depth that are expanded, and the pass over them.

    As many as there are scratch slots for, and no deeper than texts may get.

    Args:
        growth: Of R trees; the children of the depth above are known.
        depth: From 1 on.
        paged: Where their K/V lies.
        rows: Of the pass, [R * F] of them on the device, written.
    """
    above, level = growth.levels[depth - 1], growth.levels[depth]
    first, end = growth.starts[depth - 1], growth.ends[depth - 1]
    num_reqs, size = level.columns.shape
    _expand_kernel[(num_reqs,)](
        growth.scores,
        growth.tokens,
        above.used,
        above.bits,
        *level,
        paged.slots,
        paged.limits,
        paged.context,
        paged.roots,
        paged.table,
        rows.slots,
        rows.seq_lens,
        rows.tokens,
        rows.positions,
        rows.kv_slots,
        rows.context_lens,
        rows.ancestor_bits,
        growth.scores.shape[1],
        first,
        # Nobody has to compare what is fewer than a tree may have.
        end if end >= growth.num_nodes else 0,
        end - first,
        size,
        above.columns.shape[1],
        growth.num_children[depth - 1],
        depth,
        growth.num_nodes,
        paged.table.shape[1],
        paged.table.stride(0),
        paged.block_size,
        paged.max_model_len,
        NUM_WORDS=level.bits.shape[2],
        SIZE_PADDED=triton.next_power_of_2(size),
        BEST_FIRST=growth.best_first,
        PAD_SLOT=PAD_SLOT_ID,
        BLOCK=min(
            MOST_COMPARED,
            triton.next_power_of_2(end - first),
            max(1, MOST_ELEMENTS // triton.next_power_of_2(size)),
        ),
        OTHERS=OTHERS,
    )
