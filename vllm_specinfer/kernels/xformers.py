"""xFormers' tree attention behind the interface of our Triton kernel.

xFormers attends the contexts and the nodes apart and joins the two
(`xformers.ops.tree_attention`). It reads no blocks of this layout and knows one mask
per call, so the K/V of a step are gathered first, and the nodes of all requests share a
mask. It wants lengths on the host, which waits for the device in every layer: something
to compare with, not to be quick with.

Dimension legend: R requests, T query rows, H query heads, D head size.
"""

from typing import NamedTuple

import torch

from vllm_specinfer.tree.rows import TreeRows


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    scale: float,
    *,
    chains: bool = False,
) -> None:
    """Attend the tree rows of a step; other rows of `out` stay as they are.

    Args:
        query: [T, H, D], bfloat16 or float16.
        kv_cache: [B, Hkv, block_size, 2 * D] as vLLM hands it to layers, K before V;
            of the query's type.
        out: [T, H, D], written.
        block_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32; a request without rows is padding.
        seq_lens: [R] int32, KV positions written per request.
        tree: What each row sees.
        scale: Of the scores.
        chains: Attend the rows of other requests, too, as causal rows at their last
            positions.
    """
    from xformers.ops import fmha
    from xformers.ops.tree_attention import tree_attention as attend

    requests = _requests(query_start_loc, seq_lens, tree, chains)
    if not requests:
        return
    contexts = [r.context for r in requests]
    longest = max(1, *contexts)
    group = query.shape[1] // kv_cache.shape[1]

    def keys_values(first: list[int], counts: list[int]) -> list[torch.Tensor]:
        """K and V of some positions, each [1, sum of counts, Hkv, H / Hkv, D]."""
        places = [
            _places(block_table[r.index], kv_cache.shape[2], start, count)
            for r, start, count in zip(requests, first, counts, strict=True)
        ]
        blocks, offsets = torch.cat(places, dim=1)
        return [
            part.contiguous()[None, :, :, None].expand(-1, -1, -1, group, -1)
            for part in kv_cache[blocks, :, offsets].chunk(2, dim=-1)
        ]

    # Of contexts, as many for each request: K/V beyond one's own are not looked at.
    cache_k, cache_v = keys_values([0] * len(requests), [longest] * len(requests))
    spec_k, spec_v = keys_values(contexts, [r.num_nodes for r in requests])
    visible = torch.block_diag(*(_visible(r, tree) for r in requests))
    # What no row sees may be no number.
    seen = visible.any(dim=0)[:, None, None, None]
    spec_k, spec_v = (torch.where(seen, part, 0.0) for part in (spec_k, spec_v))
    bias = query.new_full(visible.shape, -torch.inf).masked_fill_(visible, 0.0)
    rows = torch.cat([torch.arange(r.first_row, r.end_row) for r in requests])
    rows = rows.to(query.device)
    prefix_bias = fmha.attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens(
        q_seqlen=[r.end_row - r.first_row for r in requests],
        kv_seqlen=contexts,
        kv_padding=longest,
    )
    attended = attend(
        # xFormers scales by D ** -0.5.
        query[rows].unflatten(1, (-1, group))[None] * (scale * query.shape[2] ** 0.5),
        spec_k,
        spec_v,
        cache_k,
        cache_v,
        bias,
        prefix_bias,
        prefix_op=fmha.triton_splitk.FwOp,
    )
    out[rows] = attended[0].flatten(1, 2)


class _Request(NamedTuple):
    """A request's rows of the query, and where its nodes begin."""

    index: int
    is_tree: bool
    first_row: int
    end_row: int
    context: int
    num_nodes: int


def _requests(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    tree: TreeRows,
    chains: bool,
) -> list[_Request]:
    """Those that are to be attended; waits for the device."""
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    is_tree, contexts = tree.is_tree.tolist(), tree.context_lens.tolist()
    requests = []
    for i, length in enumerate(lengths):
        first, end = starts[i : i + 2]
        if first < end and (is_tree[i] or chains):
            context = contexts[i] if is_tree[i] else length - (end - first)
            nodes = length - context
            requests.append(_Request(i, is_tree[i], first, end, context, nodes))
    return requests


def _places(
    blocks: torch.Tensor, block_size: int, start: int, count: int
) -> torch.Tensor:
    """[2, count] blocks and offsets of positions, some block's beyond the last one."""
    position = torch.arange(start, start + count, device=blocks.device)
    index = (position // block_size).clamp(max=len(blocks) - 1)
    return torch.stack([blocks[index].long(), position % block_size])


def _visible(request: _Request, tree: TreeRows) -> torch.Tensor:
    """[rows, nodes] bool."""
    if not request.is_tree:
        node = torch.arange(request.num_nodes, device=tree.ancestor_bits.device)
        return node <= node[:, None]
    return tree.visible(slice(request.first_row, request.end_row), request.num_nodes)
