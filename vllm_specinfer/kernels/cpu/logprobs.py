"""Log-probabilities and ranks of sampled, best and requested tokens.

Each function takes the arguments of the vLLM kernel of the same name, in its order.
vLLM asks for all rows of a batch, also for the token behind each row of a prompt that
wants nothing of it; where that is a placeholder beyond the vocabulary, nobody reads
what is found.

L logit rows, V vocabulary, M request rows, R requests, T flat tokens.
"""

import numpy as np
import torch


def topk_log_softmax(
    output: torch.Tensor,  # [L, ids]
    logits: torch.Tensor,  # [L, V]
    logits_stride: int,
    topk_ids: torch.Tensor,  # [L, ids]
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **_: object,
) -> None:
    """Log-probability of the given tokens of each row."""
    values = logits.float()
    torch.sub(
        values.gather(1, _in(values, topk_ids)),
        values.logsumexp(dim=-1, keepdim=True),
        out=output,
    )


def ranks(
    output: torch.Tensor,  # [L]
    logits: torch.Tensor,  # [L, V]
    logits_stride: int,
    token_ids: torch.Tensor,  # [L]
    vocab_size: int,
    **_: object,
) -> None:
    """How many tokens are at least as likely as the given one."""
    chosen = logits.gather(1, _in(logits, token_ids.long().unsqueeze(1)))
    # Counting set bytes row by row beats summing booleans as integers.
    for i, at_least in enumerate((logits >= chosen).numpy()):
        output[i] = int(np.count_nonzero(at_least))


def _in(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The tokens, the last one of the vocabulary for those beyond it."""
    return token_ids.clamp(max=logits.shape[1] - 1)


def fill_logprob_token_ids(
    out_token_ids: torch.Tensor,  # [L, 1 + columns], zero on entry
    out_token_ids_stride: int,
    out_valid_mask: torch.Tensor,  # [L, 1 + columns], False on entry
    out_valid_mask_stride: int,
    sampled_token_ids: torch.Tensor,  # [L]
    topk_indices: torch.Tensor,  # [L, NUM_TOPK], unread when NUM_TOPK is 0
    topk_indices_stride: int,
    expanded_idx_mapping: torch.Tensor,  # [L]
    num_per_req_token_ids: torch.Tensor,  # [M]
    per_req_token_ids: torch.Tensor,  # [M, most ids]
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
    **_: object,
) -> None:
    """The sampled token, then the request's own tokens or else the best ones."""
    ids = out_token_ids.numpy()
    valid = out_valid_mask.numpy()
    ids[:, 0] = sampled_token_ids.numpy()
    valid[:, 0] = True
    for i, request in enumerate(expanded_idx_mapping.tolist()):
        count = int(num_per_req_token_ids[request])
        if count:
            tokens = per_req_token_ids[request, :count]
        elif NUM_TOPK:
            tokens = topk_indices[i, :NUM_TOPK]
        else:
            continue
        ids[i, 1 : 1 + len(tokens)] = tokens.numpy()
        valid[i, 1 : 1 + len(tokens)] = True


def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids: torch.Tensor,  # [T]
    query_start_loc: torch.Tensor,  # [R + 1]
    idx_mapping: torch.Tensor,  # [R]
    num_computed_tokens: torch.Tensor,  # [M]
    all_token_ids: torch.Tensor,  # [M, max_model_len]
    all_token_ids_stride: int,
    **_: object,
) -> None:
    """The token that follows each scheduled one."""
    out = prompt_logprobs_token_ids.numpy()
    tokens = all_token_ids.numpy()
    starts = query_start_loc.tolist()
    for i, request in enumerate(idx_mapping.tolist()):
        first = int(num_computed_tokens[request]) + 1
        following = tokens[request, first : first + starts[i + 1] - starts[i]]
        out[starts[i] : starts[i] + following.size] = following
