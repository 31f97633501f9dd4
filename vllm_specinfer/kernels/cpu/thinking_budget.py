"""Thinking budgets: forcing the end of a reasoning part that has become too long.

Each function takes the arguments of the vLLM kernel of the same name, in its order.

L logit rows, V vocabulary, M request rows.
"""

import numpy as np
import torch


def _last(tokens: np.ndarray, marker: np.ndarray, first: int, default: int) -> int:
    """Last start of `marker` in `tokens`, counted from `first`; else `default`."""
    if len(tokens) < len(marker):
        return default
    windows = np.lib.stride_tricks.sliding_window_view(tokens, len(marker))
    found = np.flatnonzero((windows == marker).all(axis=1))
    return first + int(found[-1]) if len(found) else default


def update_committed_marker_cache(
    req_ids: torch.Tensor,  # [R]
    thinking_token_budget: torch.Tensor,  # [M], -1 without one
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    total_len: torch.Tensor,  # [M]
    cached_last_start: torch.Tensor,  # [M], updated
    cached_last_end: torch.Tensor,  # [M], updated
    cached_scan_pos: torch.Tensor,  # [M], updated
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    **_: object,
) -> None:
    """Remember where the committed tokens last start and end their reasoning."""
    longest = max(len(reasoning_start_token_ids), len(natural_reasoning_end_token_ids))
    for request in req_ids.tolist():
        if thinking_token_budget[request] < 0:
            continue
        total = int(total_len[request])
        first = int(cached_scan_pos[request])
        if first > total:
            first = 0
            cached_last_start[request] = cached_last_end[request] = -1
        tokens = all_token_ids.numpy()[request, first:total]
        for marker, cache in (
            (reasoning_start_token_ids, cached_last_start),
            (natural_reasoning_end_token_ids, cached_last_end),
        ):
            cache[request] = _last(tokens, marker.numpy(), first, int(cache[request]))
        cached_scan_pos[request] = max(0, total - (longest - 1))


def thinking_budget(
    logits: torch.Tensor,  # [L, V] float32, in place
    logits_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    thinking_token_budget: torch.Tensor,  # [M], -1 without one
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    total_len: torch.Tensor,  # [M]
    input_ids: torch.Tensor,  # [L], the input token of each row
    expanded_local_pos: torch.Tensor,  # [L]
    cached_last_start: torch.Tensor,  # [M]
    cached_last_end: torch.Tensor,  # [M]
    reasoning_start_token_ids: torch.Tensor,
    natural_reasoning_end_token_ids: torch.Tensor,
    reasoning_end_token_ids: torch.Tensor,  # what is forced
    **_: object,
) -> None:
    """Raise the next token of the forced end where the budget is spent."""
    rows = logits.numpy()
    forced = reasoning_end_token_ids.tolist()
    starts = reasoning_start_token_ids.numpy()
    ends = natural_reasoning_end_token_ids.numpy()
    for i, request in enumerate(expanded_idx_mapping.tolist()):
        budget = int(thinking_token_budget[request])
        if budget < 0:
            continue
        local_pos, total = int(expanded_local_pos[i]), int(total_len[request])
        drafts = input_ids.numpy()[i - local_pos + 1 : i + 1]
        tokens = np.concatenate([all_token_ids.numpy()[request, :total], drafts])
        # Only what reaches into the drafts is not in the caches yet.
        start, end = (
            _last(tokens[first:], marker, first, int(cache[request]))
            for marker, cache in ((starts, cached_last_start), (ends, cached_last_end))
            for first in [max(0, total - len(marker) + 1)]
        )
        if start < 0 or start <= end:
            continue
        if len(tokens) - (start + len(starts)) < budget:
            continue
        written = tokens[-len(forced) :].tolist()
        done = max(
            n
            for n in range(len(forced))
            if n <= len(written) and written[len(written) - n :] == forced[:n]
        )
        rows[i, forced[done]] = 1.0e9
