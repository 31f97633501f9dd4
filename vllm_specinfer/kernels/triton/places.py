"""Where the last tokens of texts have been seen before: a scan, newest places first.

Dimension legend: Q searches, S request slots, H texts that are searched, P places.
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024
# The place of none.
NO_PLACE = -1


@triton.jit
def _newest_places_kernel(
    places_ptr,
    searched_ptr,
    searched_stride,
    rows_ptr,
    ends_ptr,
    texts_ptr,
    text_stride,
    slots_ptr,
    lengths_ptr,
    NUM_PLACES: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    search = tl.program_id(0).to(tl.int64)
    row_ptr = searched_ptr + tl.load(rows_ptr + search) * searched_stride
    length = tl.load(lengths_ptr + search)
    end_ptr = texts_ptr + tl.load(slots_ptr + search) * text_stride + length
    end = tl.where(length >= MIN_MATCH, tl.load(ends_ptr + search), 0)
    first = tl.maximum(end - 1, 0) // BLOCK * BLOCK
    found = 0
    while (first >= 0) & (found < NUM_PLACES):
        place = first + tl.arange(0, BLOCK)
        matches = (place >= MIN_MATCH) & (place < end)
        for back in tl.static_range(1, MIN_MATCH + 1):
            token = tl.load(row_ptr + place - back, mask=matches, other=0)
            last = tl.load(end_ptr - back, mask=length >= back, other=-1)
            matches = matches & (token == last)
        ones = matches.to(tl.int32)
        count = tl.sum(ones)
        if count > 0:
            newer = found + count - tl.cumsum(ones)
            kept_ptr = places_ptr + search * NUM_PLACES + newer
            tl.store(kept_ptr, place, mask=matches & (newer < NUM_PLACES))
        found += count
        first -= BLOCK


def newest_places(
    searched: torch.Tensor,
    rows: torch.Tensor,
    ends: torch.Tensor,
    texts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_places: int,
    min_match: int,
) -> torch.Tensor:
    """The last places behind the tokens that a text ends with.

    Args:
        searched: [H, *] int32 tokens that are searched.
        rows: [Q] int64 which of them.
        ends: [Q] int64 how many of its tokens there are.
        texts: [S, *] int32 tokens whose end is looked for.
        slots: [Q] int64 which of them.
        lengths: [Q] int64 how many tokens it has.
        num_places: Most places to find (P).
        min_match: So many last tokens stand before a place.

    Returns:
        [Q, P] int64 places, newest first and below `ends`; `NO_PLACE` behind them.
    """
    shape = len(rows), num_places
    places = torch.full(shape, NO_PLACE, dtype=torch.int64, device=texts.device)
    if len(rows):
        _newest_places_kernel[(len(rows),)](
            places,
            searched,
            searched.stride(0),
            rows,
            ends,
            texts,
            texts.stride(0),
            slots,
            lengths,
            NUM_PLACES=num_places,
            MIN_MATCH=min_match,
            BLOCK=BLOCK,
        )
    return places
