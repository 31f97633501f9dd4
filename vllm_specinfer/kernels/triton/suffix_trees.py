"""Trees of what followed the longest matches, a program for each request.

Definition: `_tree` of `vllm_specinfer/drafting/suffix.py`.

Dimension legend: R requests, S request slots, P places, N nodes of a tree, C = N * P
candidates, a column per place level by level.
"""

import torch
import triton
import triton.language as tl

from vllm_specinfer.drafting.suffix import MAX_MATCH, MAX_PLACES, PAST_TRUST
from vllm_specinfer.tree.on_device import DeviceCandidates
from vllm_specinfer.tree.token_tree import ROOT

# Depths at which paths are compared at once, and columns that are cleared at once.
BLOCK, CLEARED = 8, 128


@triton.jit
def _following(searched_ptr, place, depth, end, goes_round, vocab_size):
    """The tokens of paths, negative where there is no more.

    At the end of the own text a path goes on from its place.
    """
    at = place + tl.where(goes_round, depth % (end - place), depth)
    token = tl.load(searched_ptr + at, mask=(place >= 0) & (at < end), other=-1)
    return tl.where(token < vocab_size, token, -1)


@triton.jit(do_not_specialize=["text_stride", "past_stride", "vocab_size", "num_nodes"])
def _suffix_trees_kernel(
    tokens_out_ptr,
    parents_out_ptr,
    scores_out_ptr,
    places_ptr,
    which_ptr,
    texts_ptr,
    text_stride,
    past_ptr,
    past_stride,
    filled_ptr,
    slots_ptr,
    lengths_ptr,
    correction_ptr,
    vocab_size,
    num_nodes,
    NUM_PLACES: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    PAST_TRUST: tl.constexpr,
    ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEARED: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    width = num_nodes * NUM_PLACES
    tokens_out_ptr += r * width
    parents_out_ptr += r * width
    scores_out_ptr += r * width
    for begin in range(0, width, CLEARED):
        i = begin + tl.arange(0, CLEARED)
        none = tl.full([CLEARED], float("-inf"), tl.float32)
        tl.store(scores_out_ptr + i, none, mask=i < width)
        tl.store(parents_out_ptr + i, ROOT, mask=i < width)
        tl.store(tokens_out_ptr + i, 0, mask=i < width)
    # Nodes overwrite what other threads have cleared.
    tl.debug_barrier()

    p = tl.arange(0, NUM_PLACES)
    place = tl.load(places_ptr + r * NUM_PLACES + p)
    which = tl.load(which_ptr + r)
    end = tl.load(lengths_ptr + r).to(tl.int32)
    own_ptr = texts_ptr + tl.load(slots_ptr + r) * text_stride
    searched_ptr = own_ptr
    back = tl.arange(0, MAX_MATCH)
    last = tl.load(own_ptr + end - 1 - back, mask=back < end, other=-2)
    if which > 0:
        searched_ptr = past_ptr + (which - 1) * past_stride
        end = tl.load(filled_ptr + which - 1).to(tl.int32)
    at = place[:, None] - 1 - back[None, :]
    before = tl.load(searched_ptr + at, mask=at >= 0, other=-1)
    matched = tl.min(tl.where(before == last[None, :], MAX_MATCH, back[None, :]), 1)
    longest = tl.max(matched, 0)
    is_path = (place >= 0) & (matched == longest)

    # Of each two paths, how many nodes they share; with itself a path shares all.
    pairs = is_path[:, None] & is_path[None, :]
    shared = tl.where(pairs, num_nodes, -1)
    num_steps = tl.where(longest > 0, num_nodes, 0)
    for begin in range(0, num_steps, BLOCK):
        d = begin + tl.arange(0, BLOCK)
        token = _following(
            searched_ptr, place[:, None], d[None, :], end, which == 0, vocab_size
        )
        same = (token[:, None, :] == token[None, :, :]) & (token >= 0)[:, None, :]
        parts = tl.min(tl.where(same, num_nodes, d[None, None, :]), 2)
        shared = tl.minimum(shared, parts)
    path_end = tl.max(shared, 0)

    factor, offset = tl.load(correction_ptr), tl.load(correction_ptr + 1)
    # Of each path the next node's depth, and what the nodes above it come to.
    depth = tl.zeros([NUM_PLACES], tl.int32)
    parent = tl.full([NUM_PLACES], ROOT, tl.int32)
    reached = tl.full([NUM_PLACES], 1.0, tl.float64)
    score = tl.zeros([NUM_PLACES], tl.float64)
    for _ in range(num_steps):
        through = tl.sum((shared > depth[None, :]).to(tl.int32), 0)
        above = tl.sum((shared >= depth[None, :]).to(tl.int32), 0)
        share = tl.maximum(through, 1).to(tl.float64) / tl.maximum(above, 1)
        # `chance_after`.
        goes_on = 1 - 1 / tl.maximum(longest + depth, 2).to(tl.float64)
        goes_on = tl.where((which > 0) & (depth == 0), goes_on * PAST_TRUST, goes_on)
        chance = share * goes_on
        own = score + (tl.log(chance) * factor - offset)
        chance *= reached
        # The likeliest node, of equal ones the first column's: that of the first path,
        # too, where several share it.
        column = depth * NUM_PLACES + p
        is_node = depth < path_end
        is_best = is_node & (chance == tl.max(tl.where(is_node, chance, 0.0), 0))
        best = tl.min(tl.where(is_best, column, width), 0)
        is_best = is_best & (column == best)
        token = _following(searched_ptr, place, depth, end, which == 0, vocab_size)
        tl.store(tokens_out_ptr + column, token, mask=is_best)
        tl.store(parents_out_ptr + column, parent, mask=is_best)
        tl.store(scores_out_ptr + column, own, mask=is_best)
        # What is next on all paths through it is below it.
        of_best = p[:, None] == best % NUM_PLACES
        passes = tl.max(tl.where(of_best, shared, -1), 0) > depth
        parent = tl.where(passes, best, parent)
        reached = tl.where(passes, chance, reached)
        score = tl.where(passes, own, score)
        depth += passes.to(tl.int32)


def suffix_trees(
    places: torch.Tensor,
    which: torch.Tensor,
    texts: torch.Tensor,
    past: torch.Tensor,
    filled: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    correction: torch.Tensor,
    vocab_size: int,
    num_nodes: int,
) -> DeviceCandidates:
    """The N likeliest nodes of each of R requests.

    Args:
        places: [R, P] int32, as of `newest_places`.
        which: [R] int32, as of `newest_places`.
        texts: [S, *] int32, and the next four, as for `newest_places`.
        past: [2, *] int32.
        filled: [2] int64.
        slots: [R] int64.
        lengths: [R] int64.
        correction: [2] float32 of chances, `Calibration.line`.
        vocab_size: Higher tokens are no nodes.
        num_nodes: N.

    Returns:
        [R, C]; parents are columns.
    """
    tokens = slots.new_empty(len(slots), num_nodes * MAX_PLACES)
    parents = torch.empty_like(tokens)
    scores = torch.empty_like(tokens, dtype=torch.float32)
    _suffix_trees_kernel[(len(slots),)](
        *(tokens, parents, scores, places, which),
        *(texts, texts.stride(0), past, past.stride(0), filled),
        *(slots, lengths, correction, vocab_size, num_nodes),
        NUM_PLACES=MAX_PLACES,
        MAX_MATCH=MAX_MATCH,
        PAST_TRUST=PAST_TRUST,
        ROOT=ROOT,
        BLOCK=BLOCK,
        CLEARED=CLEARED,
        num_warps=1,
    )
    return DeviceCandidates(tokens, parents, scores)
