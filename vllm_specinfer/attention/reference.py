"""Tree attention in plain torch: the definition that the kernels are tested against.

Dimension legend: R requests, T query rows, H query heads, D head size, S KV positions.
"""

from collections.abc import Callable

import torch

from vllm_specinfer.tree.rows import TreeRows


def attend_rows(
    query: torch.Tensor,
    keys_values: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]],
    out: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: int = 0,
    chains: bool = False,
) -> None:
    """Attend the tree rows of a step in float32; other rows of `out` stay as they are.

    Args:
        query: [T, H, D].
        keys_values: K and V of the first S positions of request r, called as (r, S);
            each [S, Hkv, D].
        out: [T, H, D], written.
        query_start_loc: [R + 1].
        seq_lens: [R] KV positions written per request.
        tree: What each row sees.
        scale: Of the scores.
        softcap: Cap of the scores, 0 for none.
        sinks: [H] sink logits.
        window: How many last positions of its path a row sees, 0 for all.
        chains: Attend the rows of other requests, too; they are their last positions.
    """
    for r in range(len(seq_lens)):
        start, end = query_start_loc[r : r + 2].tolist()
        length, num_rows = int(seq_lens[r]), end - start
        is_tree = bool(tree.is_tree[r])
        if num_rows == 0 or not (is_tree or chains):
            continue
        context = int(tree.context_lens[r]) if is_tree else length - num_rows
        visible = query.new_ones(num_rows, length, dtype=torch.bool)
        if is_tree:
            visible[:, context:] = tree.visible(slice(start, end), length - context)
        else:
            visible[:, context:].tril_()
        if window:
            later = visible.sum(1, keepdim=True) - visible.cumsum(1)
            visible &= later < window
        key, value = (x.float() for x in keys_values(r, length))
        num_kv_heads = key.shape[1]
        q = query[start:end].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->qhgk", q, key) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores.masked_fill_(~visible[:, None, None], -torch.inf)
        if sinks is not None:
            sink = sinks.float().view(1, num_kv_heads, -1, 1)
            scores = torch.cat([scores, sink.expand(len(q), -1, -1, -1)], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        # What no row sees may be no number.
        value = torch.where(visible.any(0)[:, None, None], value, 0.0)
        attended = torch.einsum("qhgk,khd->qhgd", weights, value)
        out[start:end] = attended.flatten(1, 2).to(out.dtype)
