"""Staged writes and model inputs: the step's index bookkeeping in NumPy.

Each function replaces the vLLM Triton kernel of the same name (less its leading
underscore and ``_kernel``) and takes that kernel's arguments in its order. Strides
are ignored: the tensors carry them. ``.numpy()`` shares memory, so writing into a
view writes the tensor, at a hundredth of the cost of a torch operator this small.

R requests of the step, M request rows (``max_num_reqs``), T flat tokens, L logit rows.
"""

import ctypes

import numpy as np
import torch

INT32_BYTES = 4


def apply_write(
    output: torch.Tensor,  # [rows, ...], or addresses [groups] with multi_group
    output_stride: int | torch.Tensor,  # row stride, or [groups] with multi_group
    write_indices: torch.Tensor,  # [writes]
    write_starts: torch.Tensor,  # [writes]
    write_contents: torch.Tensor,  # flat values of all writes
    write_cu_lens: torch.Tensor,  # [writes]
    write_group_ids: torch.Tensor | None,  # [writes]
    MULTI_GROUP: bool,
    **_: object,
) -> None:
    """Copy each staged run of values into its row, at its start column."""
    rows = write_indices.tolist()
    starts = write_starts.tolist()
    ends = write_cu_lens.tolist()
    begin = 0
    if MULTI_GROUP:
        addresses = output.tolist()
        strides = output_stride.tolist()
        contents_address = write_contents.data_ptr()
        groups = write_group_ids.tolist()
        for group, row, start, end in zip(groups, rows, starts, ends, strict=True):
            offset = row * strides[group] + start
            ctypes.memmove(
                addresses[group] + offset * INT32_BYTES,
                contents_address + begin * INT32_BYTES,
                (end - begin) * INT32_BYTES,
            )
            begin = end
        return
    flat = output.view(-1).numpy()
    contents = write_contents.numpy()
    for row, start, end in zip(rows, starts, ends, strict=True):
        first = row * output_stride + start
        flat[first : first + end - begin] = contents[begin:end]
        begin = end


def prepare_prefill_inputs(
    input_ids: torch.Tensor,  # [T]
    next_prefill_tokens: torch.Tensor,  # [lookahead, M]
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    prefill_lens: torch.Tensor,  # [M]
    num_computed_tokens: torch.Tensor,  # [M]
    **_: object,
) -> None:
    """Copy the scheduled part of every unfinished prefill into ``input_ids``."""
    idx = idx_mapping.numpy()
    computed = num_computed_tokens.numpy()[idx]
    prefill = prefill_lens.numpy()[idx]
    rows = np.flatnonzero(computed < prefill)
    if not rows.size:
        return
    ids = input_ids.numpy()
    starts = query_start_loc.numpy()
    tokens = all_token_ids.numpy()
    lookahead = next_prefill_tokens.numpy()
    for i in rows.tolist():
        request = int(idx[i])
        start, end = int(starts[i]), int(starts[i + 1])
        first = int(computed[i])
        last = first + end - start
        ids[start:end] = tokens[request, first:last]
        ahead = tokens[request, last : min(last + num_lookahead, int(prefill[i]))]
        lookahead[:, request] = 0
        lookahead[: ahead.size, request] = ahead


def apply_prompt_embeds(
    inputs_embeds: torch.Tensor,  # [T, hidden]
    inputs_embeds_stride: int,
    embeds_ptrs: torch.Tensor,  # [M] uint64 addresses of [length, hidden], of that type
    mask_ptrs: torch.Tensor,  # [M] uint64 addresses of [length] int8, 0 for none
    embeds_lens: torch.Tensor,  # [M]
    idx_mapping: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    num_computed_tokens: torch.Tensor,  # [M]
    hidden_size: int,
    **_: object,
) -> None:
    """Put the user's embeddings over the rows of prompts that are no token ids."""
    starts = query_start_loc.tolist()
    row_bytes = hidden_size * inputs_embeds.element_size()
    for i, request in enumerate(idx_mapping.tolist()):
        first = int(num_computed_tokens[request])
        count = min(starts[i + 1] - starts[i], int(embeds_lens[request]) - first)
        if count <= 0:
            continue
        rows = inputs_embeds[starts[i] : starts[i] + count]
        given = _at(int(embeds_ptrs[request]) + first * row_bytes, count * row_bytes)
        given = given.view(inputs_embeds.dtype).view(count, hidden_size)
        if not (mask := int(mask_ptrs[request])):
            rows.copy_(given)
            continue
        is_embedded = _at(mask + first, count) == 0
        rows[is_embedded] = given[is_embedded]


def _at(address: int, size: int) -> torch.Tensor:
    """[size] uint8 of memory that others own."""
    memory = (ctypes.c_uint8 * size).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def prepare_pos_seq_lens(
    pos: torch.Tensor,  # [T]
    seq_lens: torch.Tensor,  # [M]
    idx_mapping: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    num_computed_tokens: torch.Tensor,  # [M]
    max_num_reqs: int,
    **_: object,
) -> None:
    """Positions of the step's tokens and each request's length after the step."""
    idx = idx_mapping.numpy()
    num_reqs = idx.shape[0]
    starts = query_start_loc.numpy()[: num_reqs + 1]
    computed = num_computed_tokens.numpy()[idx]
    query_lens = np.diff(starts)
    lens = seq_lens.numpy()
    lens[:num_reqs] = computed + query_lens
    # Attention backends read the padded rows too.
    lens[num_reqs:max_num_reqs] = 0
    begin, end = int(starts[0]), int(starts[-1])
    if end - begin == num_reqs and (query_lens == 1).all():
        pos.numpy()[begin:end] = computed
        return
    pos.numpy()[begin:end] = np.arange(begin, end) + np.repeat(
        computed - starts[:-1], query_lens
    )


def prepare_rope_positions(
    positions: torch.Tensor,  # [D, T + 1], D dimensions
    positions_stride: int,
    prefill_positions: torch.Tensor,  # [M * D, max_model_len]
    prefill_positions_stride0: int,
    prefill_positions_stride1: int,
    prefill_delta: torch.Tensor,  # [M]
    idx_mapping: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    prefill_lens: torch.Tensor,  # [M]
    num_computed_tokens: torch.Tensor,  # [M]
    NUM_DIMS: int,
    **_: object,
) -> None:
    """Positions of M-RoPE: a prefill's own, those behind it in all dimensions alike."""
    out, own = positions.numpy(), prefill_positions.numpy()
    own = own.reshape(-1, NUM_DIMS, own.shape[1])
    starts, deltas = query_start_loc.tolist(), prefill_delta.numpy()
    computed, prefill = num_computed_tokens.numpy(), prefill_lens.numpy()
    for i, request in enumerate(idx_mapping.tolist()):
        start, end = starts[i], starts[i + 1]
        first = int(computed[request])
        last = first + end - start
        if first < prefill[request]:
            out[:, start:end] = own[request, :, first:last]
        else:
            out[:, start:end] = np.arange(first, last) + deltas[request]


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,  # [T]
    idx_mapping: torch.Tensor,  # [R]
    last_sampled_tokens: torch.Tensor,  # [M] or [M, 1]
    query_start_loc: torch.Tensor,  # [R + 1]
    seq_lens: torch.Tensor,  # [R]
    prefill_len: torch.Tensor,  # [M]
    draft_tokens: torch.Tensor,  # [M, drafts]
    draft_tokens_stride: int,
    cu_num_logits: torch.Tensor,  # [R + 1]
    logits_indices: torch.Tensor,  # [L]
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: object,
) -> None:
    """Place the last sampled token and the drafts; list the rows that need logits."""
    first_logits, ends = cu_num_logits.tolist(), query_start_loc.tolist()
    lens, prefill = seq_lens.tolist(), prefill_len.numpy()
    ids, indices = input_ids.numpy(), logits_indices.numpy()
    last, drafts = last_sampled_tokens.view(-1).numpy(), draft_tokens.numpy()
    for i, request in enumerate(idx_mapping.tolist()):
        num_logits, end = first_logits[i + 1] - first_logits[i], ends[i + 1]
        start = end - num_logits
        indices[first_logits[i] : first_logits[i + 1]] = np.arange(start, end)
        behind_prompt = lens[i] - int(prefill[request])
        if behind_prompt <= 0:
            continue
        # Logit rows that still lie in the prompt keep their prompt token.
        if NUM_NEW_SAMPLED_TOKENS > 0 and behind_prompt >= num_logits:
            ids[start] = last[request]
        if (count := num_logits - NUM_NEW_SAMPLED_TOKENS) > 0:
            ids[end - count : end] = drafts[request, :count]


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,  # [R], in place
    num_rejected: torch.Tensor,  # [R]
    seq_lens: torch.Tensor,  # [R]
    cu_num_logits: torch.Tensor,  # [R + 1]
    idx_mapping: torch.Tensor,  # [R]
    prefill_len: torch.Tensor,  # [M]
    **_: object,
) -> None:
    """Zero both counts of requests whose prefill is not finished."""
    idx = idx_mapping.numpy()
    num_reqs = idx.shape[0]
    finished = seq_lens.numpy()[:num_reqs] >= prefill_len.numpy()[idx]
    sampled = num_sampled.numpy()
    sampled[:num_reqs] *= finished
    ends = cu_num_logits.numpy()[: num_reqs + 1]
    num_logits = ends[1:] - ends[:-1]
    num_rejected.numpy()[:num_reqs] = (num_logits - sampled[:num_reqs]) * finished


def post_update(
    idx_mapping: torch.Tensor,  # [R]
    num_computed_tokens: torch.Tensor,  # [M]
    last_sampled_tokens: torch.Tensor,  # [M] or [M, 1]
    output_bin_counts: torch.Tensor,  # [M, V]
    output_bin_counts_stride: int,
    sampled_tokens: torch.Tensor,  # [R, most sampled]
    sampled_tokens_stride: int,
    num_sampled: torch.Tensor,  # [R]
    num_rejected: torch.Tensor,  # [R]
    query_start_loc: torch.Tensor,  # [R + 1]
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    total_len: torch.Tensor,  # [M]
    draft_tokens: torch.Tensor | None = None,  # from vLLM 0.33 on
    *_: object,
    **__: object,
) -> None:
    """Append the sampled tokens to their requests and advance the counters."""
    if draft_tokens is not None:
        raise ValueError("pipeline_parallel_size must be 1 on CPU; got more")
    requests = idx_mapping.tolist()
    counts = num_sampled[: len(requests)].tolist()
    rejected = num_rejected[: len(requests)].tolist()
    starts = query_start_loc.tolist()
    sampled = sampled_tokens.numpy()
    last = last_sampled_tokens.view(-1).numpy()
    tokens = all_token_ids.numpy()
    totals, computed = total_len.numpy(), num_computed_tokens.numpy()
    for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
        if count > 0:
            first = int(totals[request])
            ids = sampled[i, :count]
            tokens[request, first : first + count] = ids
            last[request] = ids[-1]
            totals[request] = first + count
            np.add.at(output_bin_counts[request].numpy(), ids, 1)
        computed[request] += starts[i + 1] - starts[i] - rejected[i]


def expand_idx_mapping(
    idx_mapping: torch.Tensor,  # [R]
    expanded_idx_mapping: torch.Tensor,  # [L]
    expanded_local_pos: torch.Tensor,  # [L]
    cu_num_logits: torch.Tensor,  # [R + 1]
    **_: object,
) -> None:
    """Each logit row's request row, and its place among that request's rows."""
    idx = idx_mapping.numpy()
    cu_logits = cu_num_logits.numpy()[: idx.shape[0] + 1]
    num_logits = np.diff(cu_logits)
    total = int(cu_logits[-1])
    expanded_idx_mapping.numpy()[:total] = np.repeat(idx, num_logits)
    expanded_local_pos.numpy()[:total] = np.arange(total) - np.repeat(
        cu_logits[:-1], num_logits
    )
