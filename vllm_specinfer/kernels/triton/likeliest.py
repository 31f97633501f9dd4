"""Likeliest tokens of a reduced vocabulary, a program for each row.

Dimension legend: F rows, V columns of their logits, M likeliest tokens of a row.
"""

import torch
import triton
import triton.language as tl

# Tokens that a program finds one after the other, columns that its registers hold.
MOST_TOKENS, MOST_COLUMNS = 16, 32768
COLUMNS_PER_WARP = 512


@triton.jit(do_not_specialize=["num_columns", "num_tokens"])
def _likeliest_kernel(
    logprobs_ptr,
    tokens_ptr,
    logits_ptr,
    ids_ptr,
    logits_stride: tl.int64,
    num_columns,
    num_tokens,
    BLOCK: tl.constexpr,
):
    f = tl.program_id(0).to(tl.int64)
    v = tl.arange(0, BLOCK)
    inside = v < num_columns
    at = f * logits_stride + v
    logit = tl.load(logits_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
    logprob = logit - tl.max(logit, 0)
    total = tl.sum(tl.exp(logprob), 0)
    logprob -= tl.log(total)
    # What is impossible, or no number, is still before what was taken.
    IMPOSSIBLE: tl.constexpr = -3e38
    left = tl.where(logprob > IMPOSSIBLE, logprob, IMPOSSIBLE)
    left = tl.where(inside, left, float("-inf"))
    for m in range(num_tokens):
        best = tl.max(left, 0)
        place = tl.min(tl.where(left == best, v, BLOCK), 0)
        left = tl.where(v == place, float("-inf"), left)
        best = tl.where(best > IMPOSSIBLE, best, float("-inf"))
        best = tl.where(total == total, best, float("nan"))
        tl.store(logprobs_ptr + f * num_tokens + m, best)
        tl.store(tokens_ptr + f * num_tokens + m, tl.load(ids_ptr + place))


def takes(logits: torch.Tensor, count: int) -> bool:
    """Whether `likeliest` finds so many tokens of rows [F, V]."""
    return count <= MOST_TOKENS and logits.shape[1] <= MOST_COLUMNS


def likeliest(
    logits: torch.Tensor, ids: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, in descending order.

    Of equally likely ones the first; rows that hold a NaN have NaN for all.

    Args:
        logits: [F, V] of any floating-point type.
        ids: [V] int64 token of each column.
        count: M, at most V.

    Returns:
        log-probabilities [F, M] float32 and tokens [F, M] int64.
    """
    num_rows, num_columns = logits.shape
    block = triton.next_power_of_2(num_columns)
    logprobs = logits.new_empty(num_rows, count, dtype=torch.float32)
    tokens = ids.new_empty(num_rows, count)
    _likeliest_kernel[(num_rows,)](
        logprobs,
        tokens,
        logits,
        ids,
        logits.stride(0),
        num_columns,
        count,
        BLOCK=block,
        num_warps=min(max(4, block // COLUMNS_PER_WARP), 32),
    )
    return logprobs, tokens
