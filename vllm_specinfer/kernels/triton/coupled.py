"""Children of nodes under coupled verification, chosen on the device.

Definition: `coupled_children` in `vllm_specinfer/drafting/children.py`. Greedy requests
get their likeliest tokens.

Dimension legend: R requests, F rows, as many of each request, M likeliest tokens of a
row, K children.
"""

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import _log1p_neg_stable, murmur3_uniform32


@triton.jit
def sampling_distribution(
    logprob, m, inside, temperature, r, top_k_ptr, top_p_ptr, min_p_ptr
):
    """[M] float64 the SSM's distribution under a request's parameters."""
    top_p = tl.load(top_p_ptr + r)
    most_before = tl.where(top_p < 1, top_p, 2.0)
    q = tl.exp((logprob - tl.max(logprob, 0)).to(tl.float64) / temperature)
    q = tl.where(q < tl.load(min_p_ptr + r), 0.0, q)
    q = tl.where(inside & (m < tl.load(top_k_ptr + r)), q, 0.0)
    q = q / tl.sum(q, 0)
    before = tl.cumsum(q, 0) - q
    q = tl.where(before < most_before, q, 0.0)
    return q / tl.sum(q, 0)


@triton.jit(
    do_not_specialize=["depth", "rows_per_req", "num_candidates", "num_children"]
)
def _coupled_children_kernel(
    scores_ptr,
    children_ptr,
    logprobs_ptr,
    tokens_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    depth,
    rows_per_req,
    num_candidates,
    num_children,
    BLOCK: tl.constexpr,
):
    f = tl.program_id(0).to(tl.int64)
    r = f // rows_per_req
    m = tl.arange(0, BLOCK)
    inside = m < num_candidates
    at = f * num_candidates + m
    token = tl.load(tokens_ptr + at, mask=inside, other=0)
    logprob = tl.load(logprobs_ptr + at, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures_ptr + r)
    values = logprob.to(tl.float64)
    total = tl.zeros([1], tl.float64)
    if temperature > 0:
        q = sampling_distribution(
            logprob, m, inside, temperature, r, top_k_ptr, top_p_ptr, min_p_ptr
        )
        position = tl.load(positions_ptr + r) + depth
        u = murmur3_uniform32(tl.load(seeds_ptr + r), position, token)
        noise = -tl.log(-_log1p_neg_stable(u))
        values = tl.where(q > 0, tl.log(q) + noise, float("-inf"))
        best = tl.max(values, 0)
        total += best + tl.log(tl.sum(tl.exp(values - best), 0))
    one = tl.arange(0, 1)
    for k in range(num_children):
        best = tl.max(values, 0)
        # Of equal ones the likelier.
        place = tl.min(tl.where(values == best, m, BLOCK), 0)
        child = tl.sum(tl.where(m == place, token, 0), 0)
        tl.store(children_ptr + f * num_children + k, child)
        score = (best - total).to(tl.float32)
        tl.store(scores_ptr + f * num_children + k + one, score)
        values = tl.where(m == place, float("-inf"), values)


def coupled_children(
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    depth: int,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The K best of log q + the target's noise, or the likeliest at temperature 0.

    Args:
        logprobs: [F, M] float32 of the SSM, descending.
        tokens: [F, M] int64.
        seeds: [R] int64 of the requests, as are the parameters below.
        positions: [R] int64 of the roots.
        temperatures: [R] float32.
        top_k: [R] int64.
        top_p: [R] float32.
        min_p: [R] float32.
        depth: Of the rows' nodes.
        k: K.

    Returns:
        Scores [F, K] float32, -inf where there is no child, and tokens [F, K] int64.
    """
    num_rows, num_candidates = logprobs.shape
    scores = logprobs.new_empty(num_rows, k)
    children = tokens.new_empty(num_rows, k)
    _coupled_children_kernel[(num_rows,)](
        scores,
        children,
        logprobs.contiguous(),
        tokens.contiguous(),
        seeds,
        positions,
        temperatures,
        top_k,
        top_p,
        min_p,
        depth,
        num_rows // len(seeds),
        num_candidates,
        k,
        BLOCK=triton.next_power_of_2(num_candidates),
    )
    return scores, children
