"""What the rows of a step are told of the trees that only the device knows.

Used by `vllm_specinfer/tree/device_plan.py`; the definitions are `StepPlan`'s.

Dimension legend: S request slots, R requests of the step, T flat query rows, N nodes
per tree, W 64-bit words per bit row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from vllm_specinfer.tree.on_device import TreeBuffers
from vllm_specinfer.tree.rows import TreeRows

# Rows, or words of their bits, that a program writes at once.
BLOCK = 1024


class Step(NamedTuple):
    """Where the rows of a step begin, and which of them are trees.

    Attributes:
        slots: [R] int64 request slots.
        starts: [R + 1] int32 first flat row of each request.
        num_rows: [R] int32 rows of its tree, the root included; 0 without tree.
        num_computed: [S] int32 tokens computed before the step.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    num_rows: torch.Tensor
    num_computed: torch.Tensor


@triton.jit(do_not_specialize=["stride"])
def _visibility_kernel(
    is_tree_ptr,
    context_lens_ptr,
    ancestor_bits_ptr,
    slots_ptr,
    starts_ptr,
    num_rows_ptr,
    num_computed_ptr,
    bits_ptr,
    stride,
    NUM_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + r)
    tl.store(is_tree_ptr + r, num_rows > 0)
    tl.store(context_lens_ptr + r, tl.load(num_computed_ptr + slot))
    # A tree's rows follow each other in both.
    start = tl.load(starts_ptr + r).to(tl.int64) * NUM_WORDS
    for first in range(0, num_rows * NUM_WORDS, BLOCK):
        word = first + tl.arange(0, BLOCK)
        inside = word < num_rows * NUM_WORDS
        bits = tl.load(bits_ptr + slot * stride + word, mask=inside, other=0)
        tl.store(ancestor_bits_ptr + start + word, bits, mask=inside)


def write_visibility(trees: TreeRows, step: Step, buffers: TreeBuffers) -> None:
    """What attention needs to know of the rows; of those in no tree nobody asks.

    Args:
        trees: Written, as far as the step has requests and rows.
        step: The step.
        buffers: Its trees.
    """
    _, num_rows, num_words = buffers.bits.shape
    _visibility_kernel[(len(step.slots),)](
        trees.is_tree,
        trees.context_lens,
        trees.ancestor_bits,
        *step,
        buffers.bits,
        num_rows * num_words,
        NUM_WORDS=num_words,
        BLOCK=BLOCK,
    )


@triton.jit(do_not_specialize=["stride", "num_positions"])
def _positions_kernel(
    positions_ptr,
    slots_ptr,
    starts_ptr,
    num_rows_ptr,
    num_computed_ptr,
    depths_ptr,
    stride,
    num_positions,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0)
    slot = tl.load(slots_ptr + r).to(tl.int64)
    num_rows = tl.load(num_rows_ptr + r)
    root = tl.load(num_computed_ptr + slot).to(tl.int64)
    start = tl.load(starts_ptr + r)
    end = tl.load(starts_ptr + r + 1)
    for first in range(start, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        place = row - start
        in_tree = place < num_rows
        depth = tl.load(depths_ptr + slot * stride + place, mask=in_tree, other=0)
        position = root + tl.where(in_tree, depth, place)
        tl.store(positions_ptr + row, position, mask=row < end)
    if r == tl.num_programs(0) - 1:
        for first in range(end, num_positions, BLOCK):
            row = first + tl.arange(0, BLOCK)
            tl.store(positions_ptr + row, 0, mask=row < num_positions)


def write_positions(positions: torch.Tensor, step: Step, buffers: TreeBuffers) -> None:
    """Positions of all rows, where siblings share one, and zeros behind them.

    Args:
        positions: [T'] int64, T' >= T; written.
        step: The step.
        buffers: Its trees.
    """
    _positions_kernel[(len(step.slots),)](
        positions,
        *step,
        buffers.depths,
        buffers.depths.shape[1],
        len(positions),
        BLOCK=BLOCK,
    )
