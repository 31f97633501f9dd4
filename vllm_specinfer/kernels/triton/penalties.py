"""Penalties of rows whose drafted tokens do not stand in the rows before them.

Definition: `apply_penalties` of vllm/v1/worker/gpu/sample/penalties.py over each row's
path from the root down, of which only the last row counts. Here a row brings the tokens
of its path along, so that a tree takes no more rows than it has.

Dimension legend: L logits rows, V vocabulary, D drafted tokens before a row at most, S
request slots.
"""

import torch
import triton
import triton.language as tl

# Logits of one program.
BLOCK = 4096


@triton.jit(do_not_specialize=["depth"])
def _path_penalties_kernel(
    logits_ptr,
    logits_stride,
    slots_ptr,
    paths_ptr,
    depth,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    prompt_bits_ptr,
    prompt_bits_stride,
    counts_ptr,
    counts_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if repetition == 1.0 and frequency == 0.0 and presence == 0.0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    count = tl.load(counts_ptr + slot * counts_stride + token, mask=inside, other=0)
    for i in range(depth):
        drafted = tl.load(paths_ptr + row * depth + i)
        count += (token == drafted).to(tl.int32)
    word_ptrs = prompt_bits_ptr + slot * prompt_bits_stride + token // 32
    word = tl.load(word_ptrs, mask=inside, other=0)
    seen = (((word >> (token % 32)) & 1) > 0) | (count > 0)
    logit_ptrs = logits_ptr + row * logits_stride + token
    logit = tl.load(logit_ptrs, mask=inside)
    factor = tl.where(seen, repetition, 1.0)
    logit *= tl.where(logit > 0, 1.0 / factor, factor)
    logit -= frequency * count
    logit -= presence * (count > 0)
    tl.store(logit_ptrs, logit, mask=inside)


def path_penalties(
    logits: torch.Tensor,
    slots: torch.Tensor,
    paths: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
    prompt_bits: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Penalise the tokens of each row's request and path, in place.

    Args:
        logits: [L, V] float32.
        slots: [L] request slots.
        paths: [L, D] int32 tokens drafted before each row, -1 for none.
        repetition: [S] float32.
        frequency: [S] float32.
        presence: [S] float32.
        prompt_bits: [S, ceil(V / 32)] int32 a bit for each token of the prompt.
        counts: [S, V] int32 of each committed token behind it.
    """
    num_rows, vocab_size = logits.shape
    _path_penalties_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        *(logits, logits.stride(0), slots, paths, paths.shape[1]),
        *(repetition, frequency, presence),
        *(prompt_bits, prompt_bits.stride(0), counts, counts.stride(0), vocab_size),
        BLOCK=BLOCK,
    )
