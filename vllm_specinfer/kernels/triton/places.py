"""Where the last tokens of texts have been seen before: a scan, newest places first.

Dimension legend: R requests, S request slots, G tokens per generation of past texts, P
places.
"""

import torch
import triton
import triton.language as tl

from vllm_specinfer.drafting.suffix import MAX_PLACES, MIN_OWN, MIN_PAST

# Tokens that one round looks at, and with how many warps.
BLOCK, NUM_WARPS = 8192, 16
# The place of none.
NO_PLACE = -1


@triton.jit
def _search(
    places_ptr,
    searched_ptr,
    end,
    last_ptr,
    length,
    NUM_PLACES: tl.constexpr,
    MIN_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the newest places of one text; returns how many were seen."""
    found = 0
    newest = tl.where(length >= MIN_MATCH, end, 0) - 1
    while (newest >= MIN_MATCH) & (found < NUM_PLACES):
        place = newest - tl.arange(0, BLOCK)
        inside = place >= MIN_MATCH
        matches = inside
        for back in tl.static_range(1, MIN_MATCH + 1):
            token = tl.load(searched_ptr + place - back, mask=inside, other=0)
            last = tl.load(last_ptr - back, mask=length >= back, other=-1)
            matches = matches & (token == last)
        ones = matches.to(tl.int32)
        count = tl.sum(ones)
        if count > 0:
            p = found + tl.cumsum(ones) - 1
            tl.store(places_ptr + p, place, mask=matches & (p < NUM_PLACES))
        found += count
        newest -= BLOCK
    return found


@triton.jit(do_not_specialize=["text_stride", "past_stride"])
def _newest_places_kernel(
    places_ptr,
    which_ptr,
    texts_ptr,
    text_stride,
    past_ptr,
    past_stride,
    filled_ptr,
    slots_ptr,
    lengths_ptr,
    grows_ptr,
    NUM_PLACES: tl.constexpr,
    NO_PLACE: tl.constexpr,
    MIN_OWN: tl.constexpr,
    MIN_PAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    grows = tl.load(grows_ptr + r) != 0
    length = tl.where(grows, tl.load(lengths_ptr + r), 0).to(tl.int32)
    own_ptr = texts_ptr + tl.load(slots_ptr + r) * text_stride
    last_ptr = own_ptr + length
    row_ptr = places_ptr + r * NUM_PLACES
    found = _search(
        row_ptr, own_ptr, length, last_ptr, length, NUM_PLACES, MIN_OWN, BLOCK
    )
    which = 0
    while (found == 0) & (which < 2):
        past = past_ptr + which * past_stride
        end = tl.load(filled_ptr + which).to(tl.int32)
        found = _search(
            row_ptr, past, end, last_ptr, length, NUM_PLACES, MIN_PAST, BLOCK
        )
        which += 1
    p = tl.arange(0, NUM_PLACES)
    tl.store(row_ptr + p, NO_PLACE, mask=p >= found)
    tl.store(which_ptr + r, which)


def newest_places(
    texts: torch.Tensor,
    past: torch.Tensor,
    filled: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    grows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last places behind the tokens that texts end with.

    Args:
        texts: [S, *] int32 tokens, which are searched first.
        past: [2, *] int32 tokens of both generations, which are searched next.
        filled: [2] int64 how many each has.
        slots: [R] int64 texts whose ends are looked for.
        lengths: [R] int64 how many tokens each has.
        grows: [R] bool; the others have no places.

    Returns:
        [R, P] int32 places, newest first and `NO_PLACE` behind them; and [R] int32
        where: 0 in the text itself, else one more than the generation.
    """
    which = torch.empty_like(slots, dtype=torch.int32)
    places = which.new_empty(len(slots), MAX_PLACES)
    _newest_places_kernel[(len(slots),)](
        *(places, which, texts, texts.stride(0), past, past.stride(0), filled),
        *(slots, lengths, grows),
        NUM_PLACES=MAX_PLACES,
        NO_PLACE=NO_PLACE,
        MIN_OWN=MIN_OWN,
        MIN_PAST=MIN_PAST,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return places, which
