"""Allowed tokens, logit bias, minimum length, bad words, grammars, NaN counts.

Each function takes the arguments of the vLLM kernel of the same name, in its order.

L logit rows, V vocabulary, M request rows.
"""

import numpy as np
import torch


def bias(
    logits: torch.Tensor,  # [L, V] float32, in place
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    num_allowed_token_ids: torch.Tensor,  # [M]
    allowed_token_ids: torch.Tensor,  # [M, most allowed]
    allowed_token_ids_stride: int,
    num_logit_bias: torch.Tensor,  # [M]
    bias_token_ids: torch.Tensor,  # [M, most biased]
    bias_token_ids_stride: int,
    bias: torch.Tensor,  # [M, most biased]
    bias_stride: int,
    pos: torch.Tensor,  # [L]
    min_lens: torch.Tensor,  # [M]
    num_stop_token_ids: torch.Tensor,  # [M]
    restore_when_all_masked: torch.Tensor,  # [M]
    stop_token_ids: torch.Tensor,  # [M, most stops]
    stop_token_ids_stride: int,
    CHECK_ALL_MASKED_ROWS: bool,
    **_: object,
) -> None:
    """Allow-lists, then biases, then no stop token before the minimum length."""
    rows = logits.numpy()
    requests = expanded_idx_mapping.numpy()
    num_allowed = num_allowed_token_ids.numpy()[requests].tolist()
    num_bias = num_logit_bias.numpy()[requests].tolist()
    num_stop = num_stop_token_ids.numpy()[requests]
    early = pos.numpy() + 1 < min_lens.numpy()[requests]
    num_stop = (num_stop * early).tolist()
    for i, request in enumerate(requests.tolist()):
        row = rows[i]
        if num_allowed[i]:
            allowed = allowed_token_ids.numpy()[request, : num_allowed[i]]
            kept = row[allowed]
            row.fill(-np.inf)
            row[allowed] = kept
        if num_bias[i]:
            biased = bias_token_ids.numpy()[request, : num_bias[i]]
            row[biased] += bias.numpy()[request, : num_bias[i]]
        if num_stop[i]:
            stops = stop_token_ids.numpy()[request, : num_stop[i]]
            kept = row[stops]
            row[stops] = -np.inf
            if (
                CHECK_ALL_MASKED_ROWS
                and restore_when_all_masked.numpy()[request]
                and row.max() == -np.inf
            ):
                # A grammar that only allows stopping overrides the minimum.
                finite = np.isfinite(kept)
                row[stops[finite]] = kept[finite]


def bad_words(
    logits: torch.Tensor,  # [L, V] float32, in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    bad_word_token_ids: torch.Tensor,  # [M, most tokens]
    bad_word_token_ids_stride: int,
    bad_word_offsets: torch.Tensor,  # [M, most words + 1]
    bad_word_offsets_stride: int,
    num_bad_words: torch.Tensor,  # [M]
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    prompt_len: torch.Tensor,  # [M]
    total_len: torch.Tensor,  # [M]
    input_ids: torch.Tensor,  # [L], the input token of each row
    expanded_local_pos: torch.Tensor,  # [L]
    **_: object,
) -> None:
    """Mask the last token of every bad word whose beginning was just written."""
    rows = logits.numpy()
    requests = expanded_idx_mapping.numpy()
    num_words = num_bad_words.numpy()[requests]
    ids = input_ids.numpy()
    local_pos = expanded_local_pos.numpy()
    for i in np.flatnonzero(num_words).tolist():
        request = int(requests[i])
        offsets = bad_word_offsets.numpy()[request, : num_words[i] + 1].tolist()
        words = bad_word_token_ids.numpy()[request, : offsets[-1]].tolist()
        longest = max(np.diff(offsets)) - 1
        committed = all_token_ids.numpy()[
            request, int(prompt_len[request]) : int(total_len[request])
        ]
        drafts = ids[i - local_pos[i] + 1 : i + 1]
        written = committed[max(0, committed.size - longest) :].tolist()
        written += drafts.tolist()
        for start, end in zip(offsets, offsets[1:], strict=False):
            prefix = words[start : end - 1]
            if not prefix or written[-len(prefix) :] == prefix:
                rows[i, words[end - 1]] = -np.inf


def apply_grammar_bitmask(
    logits: torch.Tensor,  # [L, V], in place
    logits_stride: int,
    logits_indices: torch.Tensor,  # [masks], request * MASK_STRIDE + position
    cu_num_logits: torch.Tensor,  # [R + 1]
    bitmask: torch.Tensor,  # [masks, words], bit 1 allows the token
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
    **_: object,
) -> None:
    """Mask what the grammar forbids in the logit row each bitmask belongs to."""
    cu_logits = cu_num_logits.tolist()
    masks = bitmask.numpy()
    for i, index in enumerate(logits_indices.tolist()):
        request, position = divmod(index, MASK_STRIDE)
        row = cu_logits[request] + position
        if row >= cu_logits[request + 1] or (masks[i] == -1).all():
            continue
        forbidden = np.unpackbits(~masks[i].view(np.uint8), bitorder="little")
        logits[row].masked_fill_(
            torch.from_numpy(forbidden[:vocab_size].view(np.bool_)), float("-inf")
        )


def num_nans(
    logits: torch.Tensor,  # [R, V]
    logits_stride: int,
    num_nans: torch.Tensor,  # [R]
    vocab_size: int,
    **_: object,
) -> None:
    """Count the NaNs of each row."""
    num_nans.copy_(logits.isnan().sum(dim=-1))
