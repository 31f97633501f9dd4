"""The pass that reads what is new in texts, laid out where the host does not look on.

Used by `vllm_specinfer/drafting/tree_graphs.py`.

Dimension legend: S request slots, R requests, T rows of each of them in the pass.
"""

import torch
import triton
import triton.language as tl
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_specinfer.drafting.graphs import PassRows
from vllm_specinfer.drafting.text_copies import Texts


@triton.jit(
    do_not_specialize=[
        *("num_rows", "lookahead", "most", "text_stride"),
        *("table_width", "table_stride", "block_size"),
    ]
)
def _last_rows_kernel(
    last_ptr,
    row_slots_ptr,
    seq_lens_ptr,
    row_tokens_ptr,
    positions_ptr,
    kv_slots_ptr,
    slots_ptr,
    grows_ptr,
    num_new_ptr,
    texts_ptr,
    lengths_ptr,
    table_ptr,
    num_rows,
    lookahead,
    most,
    text_stride,
    table_width,
    table_stride,
    block_size,
    PAD_SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + r)
    length = tl.load(lengths_ptr + slot).to(tl.int64)
    length = tl.where(tl.load(grows_ptr + r) != 0, length, 0)
    end = length - lookahead
    # A text of fewer rows begins with the pass, whose other rows are for nothing.
    first = tl.maximum(end - num_rows, 0)
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    position = first + row
    is_new = (position >= end - tl.load(num_new_ptr + r)) & (position < end)
    position = tl.minimum(position, most - 1)
    text_ptr = texts_ptr + slot * text_stride
    token = tl.load(text_ptr + position + lookahead, mask=inside, other=0)
    block = tl.minimum(position // block_size, table_width - 1)
    block = tl.load(table_ptr + slot * table_stride + block, mask=inside, other=0)
    kv_slot = block.to(tl.int64) * block_size + position % block_size
    at = r * num_rows + row
    tl.store(row_tokens_ptr + at, token, mask=inside)
    tl.store(positions_ptr + at, position, mask=inside)
    tl.store(kv_slots_ptr + at, tl.where(is_new, kv_slot, PAD_SLOT), mask=inside)
    tl.store(row_slots_ptr + r, slot)
    tl.store(seq_lens_ptr + r, tl.maximum(end, 0).to(tl.int32))
    tl.store(last_ptr + r, r * num_rows + tl.maximum(end - 1 - first, 0))


def lay_out_last_rows(
    rows: PassRows,
    last: torch.Tensor,
    slots: torch.Tensor,
    grows: torch.Tensor,
    num_new: torch.Tensor,
    texts: Texts,
    paging: tuple[torch.Tensor, int],
    lookahead: int,
) -> None:
    """The last T rows of R texts, of which only new ones write K/V.

    Args:
        rows: [R * T] of the pass, on the device; written but for what is always so.
        last: [R] int64 the pass's row of each text's last token, written.
        slots: [R] int64 request slots.
        grows: [R] bool; the others are padding, whose text counts as empty.
        num_new: [R] int64 tokens that are new.
        texts: Of all slots.
        paging: [S, B] int32 blocks of all slots, and the positions of one.
        lookahead: Rows read the token so many behind their own.
    """
    num_reqs, (table, block_size) = len(slots), paging
    num_rows = len(rows.tokens) // num_reqs
    _last_rows_kernel[(num_reqs,)](
        *(last, rows.slots, rows.seq_lens, rows.tokens),
        *(rows.positions, rows.kv_slots),
        *(slots, grows, num_new, *texts, table),
        *(num_rows, lookahead, texts.tokens.shape[1] - lookahead),
        texts.tokens.stride(0),
        *(table.shape[1], table.stride(0), block_size),
        PAD_SLOT=PAD_SLOT_ID,
        BLOCK=triton.next_power_of_2(num_rows),
    )
