"""Rejection sampling of vLLM's own chain speculators, to compare them on CPU.

Each function takes the arguments of the vLLM kernel of the same name, in its order.
A whole row of logits is one block here: block columns after the first are neutral.

R requests, S draft steps, L logit rows, V vocabulary, M request rows.
"""

import math

import numpy as np
import torch

from vllm_specinfer.kernels.cpu.gumbel import noised_argmax
from vllm_specinfer.kernels.cpu.sampling import rows_fp32

_MASK = 0xFFFFFFFF
_PHILOX_ROUNDS = 10
_SMALLEST_UNIFORM = 4.6566127342e-10


def philox_uniform(seed: int, offset: int) -> float:
    """Triton's ``tl.rand`` of one 64-bit offset, never zero."""
    c0, c1, c2, c3 = offset & _MASK, (offset >> 32) & _MASK, 0, 0
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_PHILOX_ROUNDS):
        b, a = c2 * 0xCD9E8D57, c0 * 0xD2511F53
        c0, c2 = (b >> 32) ^ c1 ^ k0, (a >> 32) ^ c3 ^ k1
        c1, c3 = b & _MASK, a & _MASK
        k0 = (k0 + 0x9E3779B9) & _MASK
        k1 = (k1 + 0xBB67AE85) & _MASK
    # Bits above the sign bit fold onto the non-negative integers.
    magnitude = _MASK - c0 if c0 >> 31 else c0
    uniform = np.float32(magnitude) * np.float32(_SMALLEST_UNIFORM)
    return max(float(uniform), float(np.float32(_SMALLEST_UNIFORM)))


def flatten_sampled(
    flat_sampled: torch.Tensor,  # [L]
    sampled: torch.Tensor,  # [R, S + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [R]
    cu_num_logits: torch.Tensor,  # [R + 1]
    **_: object,
) -> None:
    """Put each request's sampled tokens on its first logit rows."""
    flat, rows = flat_sampled.numpy(), sampled.numpy()
    starts = cu_num_logits.tolist()
    for i, count in enumerate(num_sampled.tolist()):
        flat[starts[i] : starts[i] + count] = rows[i, :count]


def gather_draft_sampled(
    draft_sampled: torch.Tensor,  # [L]
    pos: torch.Tensor,  # [L]
    input_ids: torch.Tensor,  # [T]
    positions: torch.Tensor,  # [T]
    logits_indices: torch.Tensor,  # [L]
    expanded_idx_mapping: torch.Tensor,  # [L]
    expanded_local_pos: torch.Tensor,  # [L]
    prefill_len: torch.Tensor,  # [M]
    num_logits: int,
    **_: object,
) -> None:
    """Input token and position of each logit row; -1 for drafts inside a prefill."""
    indices = logits_indices.numpy()
    places = positions.numpy()[indices]
    local = expanded_local_pos.numpy()
    prefill = prefill_len.numpy()[expanded_idx_mapping.numpy()]
    placeholder = (local > 0) & (places - local < prefill)
    draft_sampled.numpy()[:] = np.where(placeholder, -1, input_ids.numpy()[indices])
    pos.numpy()[:] = places


def compute_local_logits_stats(
    target_local_argmax: torch.Tensor,  # [L, blocks]
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,  # [L, blocks]
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [L, blocks]
    target_local_sumexp_stride: int,
    draft_local_max: torch.Tensor,  # [L, blocks]
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [L, blocks]
    draft_local_sumexp_stride: int,
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    draft_logits: torch.Tensor | None,  # [M, S, V], before temperature
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    expanded_local_pos: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [M]
    vocab_size: int,
    *_args: object,
    **_: object,
) -> None:
    """Best token of greedy rows; maximum and sum of exponentials of the others.

    A request's last row is left out: it decides about no draft.
    """
    requests = expanded_idx_mapping.numpy()
    steps = expanded_local_pos.numpy()
    temps = temp.numpy()[requests]
    targets = rows_fp32(target_logits[:, :vocab_size])
    argmaxes = target_local_argmax.numpy()
    maxes, sums = target_local_max.numpy(), target_local_sumexp.numpy()
    draft_maxes, draft_sums = draft_local_max.numpy(), draft_local_sumexp.numpy()
    for neutral in (maxes, draft_maxes):
        neutral.fill(-np.inf)
    for neutral in (sums, draft_sums):
        neutral.fill(0.0)
    for i in np.flatnonzero(np.append(steps[1:], 0)).tolist():
        row = targets[i]
        if temps[i] == 0.0:
            best = row.argmax()
            argmaxes[i, 0], maxes[i, 0] = best, row[best]
            continue
        maxes[i, 0], sums[i, 0] = _max_and_sumexp(row)
        if draft_logits is not None:
            draft = _draft_row(draft_logits, requests[i], steps[i], vocab_size)
            draft_maxes[i, 0], draft_sums[i, 0] = _max_and_sumexp(draft / temps[i])


def rejection(
    sampled: torch.Tensor,  # [R, S + 1]
    sampled_stride: int,
    rejected_steps: torch.Tensor,  # [R]
    target_rejected_logsumexp: torch.Tensor,  # [R]
    draft_rejected_logsumexp: torch.Tensor,  # [R]
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_local_argmax: torch.Tensor,  # [L, blocks]
    target_local_argmax_stride: int,
    target_local_max: torch.Tensor,  # [L, blocks]
    target_local_max_stride: int,
    target_local_sumexp: torch.Tensor,  # [L, blocks]
    target_local_sumexp_stride: int,
    draft_sampled: torch.Tensor,  # [L], -1 for placeholders
    draft_logits: torch.Tensor | None,  # [M, S, V]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max: torch.Tensor,  # [L, blocks]
    draft_local_max_stride: int,
    draft_local_sumexp: torch.Tensor,  # [L, blocks]
    draft_local_sumexp_stride: int,
    cu_num_logits: torch.Tensor,  # [R + 1]
    idx_mapping: torch.Tensor,  # [R]
    temp: torch.Tensor,  # [M]
    seed: torch.Tensor,  # [M]
    pos: torch.Tensor,  # [L]
    synthetic_conditional_rates: torch.Tensor | None,  # [S]
    *_args: object,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    FLY_WINDOW_SIZE: int = 0,
    **_: object,
) -> None:
    """Accept each request's drafts up to the first rejection."""
    if USE_BLOCK_VERIFICATION or FLY_WINDOW_SIZE:
        method = "block" if USE_BLOCK_VERIFICATION else "fly"
        raise ValueError(
            f"rejection_sample_method must not be {method!r} on CPU; got {method!r}"
        )
    starts = cu_num_logits.tolist()
    drafts = draft_sampled.tolist()
    places = pos.tolist()
    requests = idx_mapping.tolist()
    for i, request in enumerate(requests):
        request_temp = float(temp[request])
        request_seed = int(seed[request])
        target_lse = draft_lse = 0.0
        accepted_length = 0
        for step in range(starts[i + 1] - starts[i] - 1):
            row = starts[i] + step
            draft = drafts[row + 1]
            if request_temp == 0.0:
                best = int(target_local_argmax[row, 0])
                accepted = draft == best
                if SYNTHETIC_MODE:
                    u = philox_uniform(request_seed, places[row])
                    accepted = u < float(synthetic_conditional_rates[step])
                accepted &= draft >= 0
                sampled[i, step] = draft if accepted else best
            else:
                if draft < 0:
                    break
                u = philox_uniform(request_seed, places[row])
                target_lse = _logsumexp(target_local_max, target_local_sumexp, row)
                target_logprob = float(target_logits[row, draft]) - target_lse
                draft_logprob = draft_lse = 0.0
                if draft_logits is not None:
                    draft_lse = _logsumexp(draft_local_max, draft_local_sumexp, row)
                    logit = float(draft_logits[request, step, draft])
                    draft_logprob = logit / request_temp - draft_lse
                if SYNTHETIC_MODE:
                    accepted = u < float(synthetic_conditional_rates[step])
                else:
                    accepted = target_logprob > math.log(u) + draft_logprob
                sampled[i, step] = draft
            if not accepted:
                break
            accepted_length += 1
        rejected_steps[i] = accepted_length
        target_rejected_logsumexp[i] = target_lse
        draft_rejected_logsumexp[i] = draft_lse


def resample(
    resampled_local_argmax: torch.Tensor,  # [R, blocks]
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,  # [R, blocks]
    resampled_local_max_stride: int,
    target_logits: torch.Tensor,  # [L, V]
    target_logits_stride: int,
    target_rejected_logsumexp: torch.Tensor,  # [R]
    draft_logits: torch.Tensor | None,  # [M, S, V]
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp: torch.Tensor,  # [R]
    rejected_step: torch.Tensor,  # [R]
    cu_num_logits: torch.Tensor,  # [R + 1]
    expanded_idx_mapping: torch.Tensor,  # [L]
    draft_sampled: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [M]
    seed: torch.Tensor,  # [M]
    pos: torch.Tensor,  # [L]
    cumulative_log_p: torch.Tensor | None,
    contexts: torch.Tensor | None,
    contexts_stride: int,
    watermarking: torch.Tensor | None,
    watermarking_skip_mask: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    USE_FP64: bool,
    WATERMARK: bool,
    **_: object,
) -> None:
    """Draw the rejected or the bonus token; greedy rejections already have theirs."""
    if WATERMARK:
        raise ValueError("watermarking must be off on CPU; got a watermark key")
    starts = cu_num_logits.tolist()
    for i, step in enumerate(rejected_step.tolist()):
        row = starts[i] + step
        is_bonus = row == starts[i + 1] - 1
        request = int(expanded_idx_mapping[row])
        request_temp = temp.numpy()[request]
        if request_temp == 0.0 and not is_bonus:
            continue
        logits = rows_fp32(target_logits[row, :vocab_size])
        rejected = -1 if is_bonus else int(draft_sampled[row + 1])
        if rejected >= 0 and draft_logits is not None:
            draft = _draft_row(draft_logits, request, step, vocab_size)
            draft = draft / request_temp - draft_rejected_logsumexp.numpy()[i]
            logits = _log_residual(logits - target_rejected_logsumexp.numpy()[i], draft)
        elif rejected >= 0:
            logits = logits.copy()
            logits[rejected] = -np.inf
        if request_temp == 0.0:
            winner = int(logits.argmax())
            value = float(logits[winner])
        else:
            winners, values = noised_argmax(
                logits[None],
                np.ones(1, np.float32),
                seed.numpy()[[request]],
                pos.numpy()[[row]],
                USE_FP64,
            )
            winner, value = int(winners[0]), float(values[0])
        resampled_local_argmax[i, 0] = winner
        resampled_local_max[i].fill_(-math.inf)
        resampled_local_max[i, 0] = value


def insert_resampled(
    sampled: torch.Tensor,  # [R, S + 1]
    sampled_stride: int,
    num_sampled: torch.Tensor,  # [R]
    resampled_local_argmax: torch.Tensor,  # [R, blocks]
    resampled_local_argmax_stride: int,
    resampled_local_max: torch.Tensor,  # [R, blocks]
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits: torch.Tensor,  # [R + 1]
    expanded_idx_mapping: torch.Tensor,  # [L]
    temp: torch.Tensor,  # [M]
    **_: object,
) -> None:
    """Append the drawn token to the accepted ones and count it."""
    starts = cu_num_logits.tolist()
    for i, count in enumerate(num_sampled.tolist()):
        row = starts[i] + count
        is_bonus = row == starts[i + 1] - 1
        if is_bonus or float(temp[int(expanded_idx_mapping[row])]) != 0.0:
            sampled[i, count] = resampled_local_argmax[i, 0]
    num_sampled += 1


def prepare_draft_prefill_inputs(
    target_input_ids: torch.Tensor,  # [T]
    target_positions: torch.Tensor,  # [T]
    last_sampled: torch.Tensor,  # [M]
    idx_mapping: torch.Tensor,  # [R]
    out_input_ids: torch.Tensor,  # [T + R]
    out_positions: torch.Tensor,  # [T + R]
    last_token_indices: torch.Tensor,  # [M]
    out_query_start_loc: torch.Tensor,  # [M + 1]
    out_seq_lens: torch.Tensor,  # [M]
    query_start_loc: torch.Tensor,  # [R + 1]
    seq_lens: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
    max_num_reqs: int,
    max_model_len: int,
    **_: object,
) -> None:
    """A draft model's first input: accepted tokens, the sampled one, then padding."""
    requests = idx_mapping.tolist()
    num_reqs = len(requests)
    starts = query_start_loc.tolist()
    rejected = num_rejected.tolist()
    ids, positions = out_input_ids.numpy(), out_positions.numpy()
    targets = target_input_ids.numpy()
    last = last_token_indices.numpy()
    out_starts = out_query_start_loc.numpy()
    for i, request in enumerate(requests):
        start, end = starts[i], starts[i + 1]
        out_start = start + i
        valid = end - start - rejected[i]
        ids[out_start : end + i + 1] = 0
        ids[out_start : out_start + valid] = targets[start : start + valid]
        ids[out_start + valid] = int(last_sampled[request])
        first = int(target_positions[start])
        places = np.arange(first, first + end - start + 1)
        positions[out_start : end + i + 1] = np.minimum(places, max_model_len - 1)
        last[i] = out_start + valid
        out_starts[i] = out_start
    out_starts[num_reqs : max_num_reqs + 1] = starts[num_reqs] + num_reqs
    last[num_reqs:max_num_reqs] = 0
    lens = out_seq_lens.numpy()
    lens[:num_reqs] = np.minimum(seq_lens.numpy()[:num_reqs] + 1, max_model_len)
    lens[num_reqs:max_num_reqs] = 0


def _max_and_sumexp(row: np.ndarray) -> tuple[float, float]:
    best = row.max()
    return best, float(np.exp(row - best).sum()) if best > -np.inf else 0.0


def _logsumexp(maxes: torch.Tensor, sums: torch.Tensor, row: int) -> float:
    return float(maxes[row, 0]) + math.log(float(sums[row, 0]))


def _draft_row(
    draft_logits: torch.Tensor, request: int, step: int, vocab_size: int
) -> np.ndarray:
    return rows_fp32(draft_logits[int(request), int(step), :vocab_size])


def _log_residual(target: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """log(max(exp(target) - exp(draft), 0)) of log-probabilities [V]."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.exp(draft - target)
        return np.where(ratio < 1.0, target + np.log1p(-ratio), -np.inf).astype(
            np.float32
        )
