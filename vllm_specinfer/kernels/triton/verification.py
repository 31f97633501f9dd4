"""Verification on the device: tests of drawn children, and the walk down the trees.

Every logits row gets its token first, wherever it stands: drawn children are tested,
what is left of the others goes through vLLM's own sampler; then one program per request
follows the tokens down its tree. Nothing of this waits for the host.

Definitions: `vllm_specinfer/verify/stochastic.py` and `vllm_specinfer/verify/walk.py`.
Used by `vllm_specinfer/verify/device_sampler.py`.

Dimension legend: L logits rows, V vocabulary, G rows with drawn children, M candidates
of a row's draws, K draws, R requests, N nodes per request.
"""

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform64

from vllm_specinfer.tree.table import WalkedTrees

# Draws of lookups, of an SSM and of both have different numbers of candidates; one
# compilation serves them all.
LEAST_BLOCK = 256


@triton.jit(do_not_specialize=["num_candidates", "num_draws"])
def _verify_draws_kernel(
    found_ptr,
    logits_ptr,
    logits_stride,
    totals_ptr,
    rows_ptr,
    tokens_ptr,
    q_ptr,
    places_ptr,
    seeds_ptr,
    positions_ptr,
    num_candidates,
    num_draws,
    BLOCK: tl.constexpr,
):
    g = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, BLOCK)
    inside = m < num_candidates
    token = tl.load(tokens_ptr + g * num_candidates + m, mask=inside, other=-1)
    known = token >= 0
    logit_ptrs = logits_ptr + tl.load(rows_ptr + g) * logits_stride + token
    logit = tl.load(logit_ptrs, mask=known, other=float("-inf")).to(tl.float64)
    total = tl.load(totals_ptr + g)
    p = tl.exp(logit - total)
    outside = 1.0 - tl.sum(p)
    seed = tl.load(seeds_ptr + g)
    position = tl.load(positions_ptr + g)
    found = -1
    for j in range(num_draws):
        draw = g * num_draws + j
        q = tl.load(q_ptr + draw * num_candidates + m, mask=inside, other=0.0)
        place = tl.load(places_ptr + draw).to(tl.int32)
        drawn = m == place
        mass = outside + tl.sum(p)
        p_drawn = tl.sum(tl.where(drawn, p, 0.0))
        q_drawn = tl.sum(tl.where(drawn, q, 0.0))
        u = murmur3_uniform64(seed, position, tl.zeros([1], tl.int32) + j)
        accepts = tl.sum((u * q_drawn * mass < p_drawn).to(tl.int32)) > 0
        tested = (found < 0) & (place >= 0)
        found = tl.where(tested & accepts, place, found)
        rejected = tested & (found < 0)
        left = tl.maximum(p - q * mass, 0.0)
        # Where p equals q but for rounding nothing may be left: then p stays.
        p = tl.where(rejected & (outside + tl.sum(left) > 0), left, p)
    chosen = tl.sum(tl.where(m == found, token, 0))
    tl.store(found_ptr + g, tl.where(found >= 0, chosen, -1))
    tl.store(logit_ptrs, (tl.log(p) + total).to(tl.float32), mask=known & (found < 0))


def verify_draws(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    q: torch.Tensor,
    places: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Test the drawn children of G rows.

    Args:
        logits: [L, V] float32, processed. Rows whose tests all reject are changed: a
            draw from them by softmax is the residual draw.
        rows: [G] int64 of `logits`.
        tokens: [G, M] int64 distinct candidates, -1 where there is none.
        q: [G, K, M] float64 distribution each draw was made from.
        places: [G, K] int64 drawn candidates in order, -1 at the end where fewer.
        seeds: [G] int64.
        positions: [G] int64, the rows' positions plus the tests' salt.

    Returns:
        [G] int64 accepted token, -1 where every test rejects.
    """
    found = torch.empty_like(rows)
    totals = logits[rows].double().logsumexp(dim=-1)
    num_candidates = tokens.shape[1]
    if len(rows):
        _verify_draws_kernel[(len(rows),)](
            found,
            logits,
            logits.stride(0),
            totals,
            rows,
            tokens.contiguous(),
            q.contiguous(),
            places.contiguous(),
            seeds,
            positions,
            num_candidates,
            places.shape[1],
            BLOCK=max(LEAST_BLOCK, triton.next_power_of_2(num_candidates)),
        )
    return found


@triton.jit
def _walk_kernel(
    path_ptr,
    count_ptr,
    emitted_ptr,
    targets_ptr,
    first_ptr,
    num_rows_ptr,
    slots_ptr,
    tokens_ptr,
    parents_ptr,
    num_nodes,
    BLOCK: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    first = tl.load(first_ptr + r)
    n = tl.arange(0, BLOCK)
    here = n < tl.load(num_rows_ptr + r) - 1
    at = tl.load(slots_ptr + r).to(tl.int64) * num_nodes + n
    parents = tl.load(parents_ptr + at, mask=here, other=-2)
    drafts = tl.load(tokens_ptr + at, mask=here, other=-1)
    path = tl.zeros([BLOCK], tl.int32)
    emitted = tl.zeros([BLOCK], tl.int64)
    node = -1  # the root
    count = 0
    walks = True
    while walks:
        target = tl.load(targets_ptr + first + node + 1)
        emitted = tl.where(n == count, target, emitted)
        # Of equal children the first counts.
        follows = here & (parents == node) & (drafts == target)
        node = tl.min(tl.where(follows, n, BLOCK))
        walks = node < BLOCK
        if walks:
            path = tl.where(n == count, node + 1, path)
            count += 1
    tl.store(path_ptr + r * num_nodes + n, path, mask=n < num_nodes)
    tl.store(emitted_ptr + r * (num_nodes + 1) + n, emitted, mask=n <= num_nodes)
    tl.store(count_ptr + r, count)


def walk_trees(
    targets: torch.Tensor, trees: WalkedTrees
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's tokens down the trees of R requests.

    Args:
        targets: [L] int64 the target's token of each row that is sampled.
        trees: The trees.

    Returns:
        [R, N] int32 accepted rows within the request, from depth 1 down, [R] int32 how
        many they are, and [R, N + 1] int64 the target's tokens along them, the root's
        first; zeros beyond.
    """
    num_reqs, num_nodes = len(trees.first), trees.parents.shape[1]
    path = trees.parents.new_empty(num_reqs, num_nodes)
    count = trees.parents.new_empty(num_reqs)
    emitted = targets.new_empty(num_reqs, num_nodes + 1)
    if num_reqs:
        _walk_kernel[(num_reqs,)](
            path,
            count,
            emitted,
            targets,
            *trees,
            num_nodes,
            BLOCK=triton.next_power_of_2(num_nodes + 1),
        )
    return path, count, emitted
