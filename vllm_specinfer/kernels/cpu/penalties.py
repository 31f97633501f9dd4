"""Repetition, frequency and presence penalties, and the token counts they use.

Each function takes the arguments of the vLLM kernel of the same name, in its order.

L logit rows, V vocabulary, M request rows, W = ceil(V / 32) words of a token set.
"""

import numpy as np
import torch


def penalties(
    logits: torch.Tensor,  # [L, V], in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    token_ids: torch.Tensor,  # [L], the input token of each row
    expanded_local_pos: torch.Tensor,  # [L]
    repetition_penalty: torch.Tensor,  # [M]
    frequency_penalty: torch.Tensor,  # [M]
    presence_penalty: torch.Tensor,  # [M]
    prompt_bin_mask: torch.Tensor,  # [M, W]
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [M, V]
    output_bin_counts_stride: int,
    vocab_size: int,
    **_: object,
) -> None:
    """Penalise the tokens seen so far, the row's own draft prefix included."""
    rows = logits.numpy()
    requests = expanded_idx_mapping.numpy()
    repetition = repetition_penalty.numpy()[requests]
    frequency = frequency_penalty.numpy()[requests]
    presence = presence_penalty.numpy()[requests]
    active = (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0)
    ids = token_ids.numpy()
    local_pos = expanded_local_pos.numpy()
    one = np.float32(1.0)
    for i in np.flatnonzero(active).tolist():
        request = requests[i]
        counts = output_bin_counts.numpy()[request, :vocab_size]
        drafts = ids[i - local_pos[i] + 1 : i + 1]
        if drafts.size:
            counts = counts.copy()
            np.add.at(counts, drafts[drafts >= 0], 1)
        row = rows[i]
        if repetition[i] != one:
            words = prompt_bin_mask.numpy()[request]
            prompt = np.unpackbits(words.view(np.uint8), bitorder="little")
            seen = np.flatnonzero((prompt[:vocab_size] != 0) | (counts > 0))
            values = row[seen]
            row[seen] = values * np.where(
                values > 0, one / repetition[i], repetition[i]
            )
        if frequency[i] or presence[i]:
            output = np.flatnonzero(counts)
            row[output] -= frequency[i] * counts[output].astype(np.float32)
            row[output] -= presence[i]


def bincount(
    expanded_idx_mapping: torch.Tensor,  # [new requests]
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [M]
    prefill_len: torch.Tensor,  # [M]
    prompt_bin_mask: torch.Tensor,  # [M, W]
    prompt_bin_mask_stride: int,
    output_bin_counts: torch.Tensor,  # [M, V]
    output_bin_counts_stride: int,
    **_: object,
) -> None:
    """The set of prompt tokens and the counts of outputs before a preemption."""
    tokens = all_token_ids.numpy()
    masks = prompt_bin_mask.numpy()
    counts = output_bin_counts.numpy()
    for request in expanded_idx_mapping.tolist():
        prompt = int(prompt_len[request])
        prefill = int(prefill_len[request])
        bits = np.zeros(masks.shape[1] * 32, np.uint8)
        known = tokens[request, :prompt]
        bits[known[known < len(bits)]] = 1  # placeholders of images may lie beyond
        masks[request] |= np.packbits(bits, bitorder="little").view(np.int32)
        if prefill > prompt:
            np.add.at(counts[request], tokens[request, prompt:prefill], 1)
