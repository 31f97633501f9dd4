"""Copies of texts that lie in the host's memory and are read again and again."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["text_stride", "copy_stride"])
def _catch_up_kernel(
    copies_ptr,
    copy_stride,
    known_ptr,
    texts_ptr,
    text_stride,
    ends_ptr,
    slots_ptr,
    lengths_ptr,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0))
    length = tl.load(ends_ptr + slot).to(tl.int64)
    tl.store(lengths_ptr + tl.program_id(0), length)
    for begin in range(tl.load(known_ptr + slot), length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        token = tl.load(texts_ptr + slot * text_stride + i, mask=i < length, other=0)
        tl.store(copies_ptr + slot * copy_stride + i, token, mask=i < length)


def catch_up(
    copies: torch.Tensor,
    known: torch.Tensor,
    texts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Copy what copies do not have yet.

    Args:
        copies: [S, *] int32 on the device.
        known: [S] int64 tokens that each copy has.
        texts: [S, *] int32 that the device can read.
        ends: [S] int32 tokens of each, too.
        slots: [R] int64 texts that are needed; the same one may be several.

    Returns:
        [R] int64 tokens of these.
    """
    lengths = torch.empty_like(slots)
    _catch_up_kernel[(len(slots),)](
        *(copies, copies.stride(0), known, texts, texts.stride(0), ends),
        *(slots, lengths),
        BLOCK=BLOCK,
    )
    # Afterwards: other threads and programs read it before they copy.
    known.index_copy_(0, slots, lengths)
    return lengths
