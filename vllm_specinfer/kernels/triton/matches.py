"""What followed the longest match of a text's end where that has been first: a scan,
oldest places first.

Definition: `Ngrams`.

Dimension legend: R requests, S request slots, N nodes of a chain.
"""

import torch
import triton
import triton.language as tl

from vllm_specinfer.tree.on_device import DeviceCandidates
from vllm_specinfer.tree.token_tree import ROOT

BLOCK = 1024


@triton.jit(
    do_not_specialize=["text_stride", "least", "most", "vocab_size", "num_nodes"]
)
def _earliest_match_kernel(
    tokens_out_ptr,
    parents_out_ptr,
    scores_out_ptr,
    texts_ptr,
    text_stride,
    slots_ptr,
    lengths_ptr,
    grows_ptr,
    correction_ptr,
    least,
    most,
    vocab_size,
    num_nodes,
    ROOT: tl.constexpr,
    NODES_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    row_ptr = texts_ptr + tl.load(slots_ptr + r) * text_stride
    grows = tl.load(grows_ptr + r) != 0
    length = tl.where(grows, tl.load(lengths_ptr + r), 0)
    longest = 0
    first = length * 0
    begin = 0
    while (begin < length) & (longest < most):
        place = begin + tl.arange(0, BLOCK)
        matched = tl.zeros([BLOCK], tl.int32)
        back = 1
        while back <= most:
            same = (matched == back - 1) & (place >= back) & (place < length)
            token = tl.load(row_ptr + place - back, mask=same, other=0)
            last = tl.load(row_ptr + length - back, mask=back <= length, other=0)
            matched += (same & (token == last)).to(tl.int32)
            # Until no place goes on.
            back = tl.where(tl.max(matched, 0) == back, back + 1, most + 1)
        found = tl.max(matched, 0)
        if found > longest:
            longest = found
            first = tl.min(tl.where(matched == found, place, length), 0)
        begin += BLOCK

    n = tl.arange(0, NODES_PADDED)
    inside, place = n < num_nodes, first + n
    there = inside & (longest >= least) & (place < length)
    token = tl.load(row_ptr + place, mask=there, other=vocab_size)
    # Below a token that is no node there is none.
    end = tl.min(tl.where(token < vocab_size, num_nodes, n), 0)
    # `chance_after`.
    chance = 1 - 1 / tl.maximum(longest + n, 2).to(tl.float64)
    factor, offset = tl.load(correction_ptr), tl.load(correction_ptr + 1)
    score = tl.cumsum(tl.log(chance) * factor - offset, 0)
    score = tl.where(n < end, score, float("-inf"))
    at = r * num_nodes + n
    tl.store(tokens_out_ptr + at, tl.where(n < end, token, 0), mask=inside)
    tl.store(parents_out_ptr + at, tl.where(n > 0, n - 1, ROOT), mask=inside)
    tl.store(scores_out_ptr + at, score, mask=inside)


def after_earliest_matches(
    texts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    grows: torch.Tensor,
    correction: torch.Tensor,
    limits: tuple[int, int],
    vocab_size: int,
    num_nodes: int,
) -> DeviceCandidates:
    """A chain per request.

    Args:
        texts: [S, *] int32 tokens.
        slots: [R] int64 which of them.
        lengths: [R] int64 how many tokens each has.
        grows: [R] bool; the others get no nodes.
        correction: [2] float32 of chances, `Calibration.line`.
        limits: Tokens of the shortest match, and so many of a longer one count.
        vocab_size: Higher tokens are no nodes.
        num_nodes: N.

    Returns:
        [R, N].
    """
    tokens = slots.new_empty(len(slots), num_nodes)
    parents = torch.empty_like(tokens)
    scores = torch.empty_like(tokens, dtype=torch.float32)
    _earliest_match_kernel[(len(slots),)](
        *(tokens, parents, scores, texts, texts.stride(0), slots, lengths, grows),
        *(correction, *limits, vocab_size, num_nodes),
        ROOT=ROOT,
        NODES_PADDED=triton.next_power_of_2(num_nodes),
        BLOCK=BLOCK,
    )
    return DeviceCandidates(tokens, parents, scores)
