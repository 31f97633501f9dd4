"""The best candidates of each request as a tree, and what verification needs of it.

Definitions: `Candidates.best`, `node_depths` and `ancestor_bits`.

Dimension legend: R requests, C candidates per request, N nodes of a tree, S request
slots, W 64-bit words per bit row.
"""

import torch
import triton
import triton.language as tl

from vllm_specinfer.tree.on_device import (
    DeviceCandidates,
    DeviceTree,
    TreeBuffers,
)
from vllm_specinfer.tree.token_tree import NO_NODE, ROOT

# Candidates that are looked at at once.
BLOCK = 64


@triton.jit(do_not_specialize=["width", "num_nodes", "max_depth"])
def _tree_kernel(
    parents_ptr,
    scores_ptr,
    kept_tokens_ptr,
    kept_parents_ptr,
    depths_ptr,
    bits_ptr,
    of_candidates_ptr,
    parents_of_candidates_ptr,
    scores_of_candidates_ptr,
    places_ptr,
    order_ptr,
    slots_ptr,
    width,
    num_nodes,
    max_depth,
    ROOT: tl.constexpr,
    NO_NODE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    NODES_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    count = 0
    for begin in range(0, width, BLOCK):
        c = begin + tl.arange(0, BLOCK)
        place = tl.load(places_ptr + r * width + c, mask=c < width, other=num_nodes)
        count += tl.sum((place < num_nodes).to(tl.int32), 0)
    n = tl.arange(0, NODES_PADDED)
    inside, is_node = n < num_nodes, n < count
    column = tl.load(order_ptr + r * width + n, mask=is_node, other=0)
    at = r * width + column
    token = tl.load(of_candidates_ptr + at, mask=is_node, other=0)
    score = tl.load(scores_of_candidates_ptr + at, mask=is_node, other=float("-inf"))
    parent = tl.load(parents_of_candidates_ptr + at, mask=is_node, other=ROOT)
    above = tl.load(
        places_ptr + r * width + parent, mask=is_node & (parent != ROOT), other=ROOT
    ).to(tl.int32)
    # A path whose chance is rounded to nothing may leave a node without its parent.
    above = tl.where(above < num_nodes, above, ROOT)
    parent = tl.where(is_node, above, NO_NODE)
    slot = tl.load(slots_ptr + r)
    to = r * num_nodes + n
    tl.store(parents_ptr + to, parent, mask=inside)
    tl.store(scores_ptr + to, score, mask=inside)
    kept = slot * num_nodes + n
    tl.store(kept_tokens_ptr + kept, token, mask=inside)
    tl.store(kept_parents_ptr + kept, parent, mask=inside)
    # Rows: the root first. What is no node sees the root and itself.
    rows_ptr = depths_ptr + slot * (num_nodes + 1)
    bit_rows_ptr = bits_ptr + slot * (num_nodes + 1) * NUM_WORDS
    one = n.to(tl.int64) * 0 + 1
    for w in tl.static_range(NUM_WORDS):
        place = n + 1 - 64 * w
        bits = tl.where((place >= 0) & (place < 64), one << (place & 63), 0)
        if w == 0:
            bits = bits | 1
        depth = n * 0 + 1
        ancestor = above
        walked = 1
        while (walked < max_depth) & (tl.max(ancestor, 0) >= 0):
            walked += 1
            has = ancestor >= 0
            place = ancestor + 1 - 64 * w
            seen = has & (place >= 0) & (place < 64)
            bits = bits | tl.where(seen, one << (place & 63), 0)
            depth += has.to(tl.int32)
            higher = tl.gather(above, tl.maximum(ancestor, 0), 0)
            ancestor = tl.where(has, higher, ROOT)
        tl.store(bit_rows_ptr + (n + 1) * NUM_WORDS + w, bits, mask=inside)
        if w == 0:
            tl.store(rows_ptr + n + 1, depth, mask=inside)
            tl.store(bit_rows_ptr, 1)
        else:
            tl.store(bit_rows_ptr + w, 0)
    tl.store(rows_ptr, 0)


def best_trees(
    candidates: DeviceCandidates,
    num_nodes: int,
    least: float,
    slots: torch.Tensor,
    buffers: TreeBuffers,
) -> DeviceTree:
    """The trees of the N best candidates, stored for their verification.

    Args:
        candidates: C of each of R requests; no child scores higher than its parent.
        num_nodes: N.
        least: The lowest score of a node.
        slots: [R] int64 rows of the buffers; several may be padding.
        buffers: Where the trees are stored.
    """
    num_reqs, width = candidates.scores.shape
    parents, scores = candidates.parents, candidates.scores.contiguous()
    descending, order = scores.sort(dim=1, descending=True, stable=True)
    kept = (descending > -torch.inf) & (descending >= least)
    nodes = torch.arange(width, device=scores.device).clamp_max(num_nodes)
    nodes = torch.where(kept, nodes, num_nodes)
    places = torch.empty_like(order).scatter_(1, order, nodes)
    tree = DeviceTree(
        order.new_empty(num_reqs, num_nodes, dtype=torch.int32),
        scores.new_empty(num_reqs, num_nodes),
        places,
    )
    _tree_kernel[(num_reqs,)](
        *(tree.parents, tree.scores),
        *(buffers.tokens, buffers.parents, buffers.depths, buffers.bits),
        candidates.tokens.contiguous(),
        parents.contiguous(),
        *(scores, places, order, slots, width, num_nodes, buffers.max_depth),
        ROOT=ROOT,
        NO_NODE=NO_NODE,
        NUM_WORDS=buffers.bits.shape[2],
        NODES_PADDED=triton.next_power_of_2(num_nodes),
        BLOCK=BLOCK,
    )
    return tree
