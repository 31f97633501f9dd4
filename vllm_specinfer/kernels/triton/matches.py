"""Where the longest match of a text's end has been first: a scan, oldest places first.

Dimension legend: R requests, S request slots.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["text_stride", "most"])
def _earliest_match_kernel(
    matched_ptr,
    places_ptr,
    texts_ptr,
    text_stride,
    slots_ptr,
    lengths_ptr,
    most,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row_ptr = texts_ptr + tl.load(slots_ptr + request) * text_stride
    length = tl.load(lengths_ptr + request)
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
    tl.store(matched_ptr + request, longest)
    tl.store(places_ptr + request, first)


def earliest_matches(
    texts: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest matches of what texts end with, as `Ngrams` defines them.

    Args:
        texts: [S, *] int32 tokens.
        slots: [R] int64 which of them.
        lengths: [R] int64 how many tokens each has.
        most: So many tokens of a match count.

    Returns:
        [R] int32 how many tokens match, 0 for none, and [R] int64 the first place
        behind so many.
    """
    matched = torch.empty_like(slots, dtype=torch.int32)
    places = torch.empty_like(slots)
    if len(slots):
        _earliest_match_kernel[(len(slots),)](
            *(matched, places, texts, texts.stride(0), slots, lengths, most),
            BLOCK=BLOCK,
        )
    return matched, places
