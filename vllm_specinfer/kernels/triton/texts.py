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
    slots_ptr,
    lengths_ptr,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0))
    length = tl.load(lengths_ptr + tl.program_id(0))
    for begin in range(tl.load(known_ptr + slot), length, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        token = tl.load(texts_ptr + slot * text_stride + i, mask=i < length, other=0)
        tl.store(copies_ptr + slot * copy_stride + i, token, mask=i < length)


def catch_up(
    copies: torch.Tensor,
    known: torch.Tensor,
    texts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Copy what copies do not have yet.

    Args:
        copies: [S, *] int32 on the device.
        known: [S] int64 tokens that each copy has.
        texts: [S, *] int32 that the device can read.
        slots: [R] int64 texts that are needed; the same one may be several.
        lengths: [R] int64 tokens of each.
    """
    if len(slots):
        _catch_up_kernel[(len(slots),)](
            copies,
            copies.stride(0),
            known,
            texts,
            texts.stride(0),
            slots,
            lengths,
            BLOCK=BLOCK,
        )
        # Afterwards: other threads and programs read it before they copy.
        known.index_copy_(0, slots, lengths)
