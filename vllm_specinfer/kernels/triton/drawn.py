"""Children of nodes under "mss", "rrs" and "naive", drawn on the device.

Definition: `ChildChooser.choose` in `vllm_specinfer/drafting/children.py`. Greedy
requests get their likeliest tokens.

Dimension legend: R requests, F rows, as many of each request, M likeliest tokens of a
row, K children.
"""

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform64

from vllm_specinfer.drafting.children import FLAT_ACCEPTANCE, MAX_CHILDREN
from vllm_specinfer.kernels.triton.coupled import sampling_distribution
from vllm_specinfer.noise import DRAFT_NOISE_SALT
from vllm_specinfer.tree.device_draws import RowDraws
from vllm_specinfer.tree.proposals import NO_DRAW


@triton.jit(do_not_specialize=["rows_per_req", "num_candidates", "num_children"])
def _drawn_children_kernel(
    scores_ptr,
    children_ptr,
    places_ptr,
    q_ptr,
    logprobs_ptr,
    tokens_ptr,
    seeds_ptr,
    roots_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    columns_ptr,
    rows_per_req,
    num_candidates,
    num_children,
    REPLACES: tl.constexpr,
    FLAT: tl.constexpr,
    SALT: tl.constexpr,
    MAX_CHILDREN: tl.constexpr,
    NO_DRAW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    f = tl.program_id(0).to(tl.int64)
    r = f // rows_per_req
    m = tl.arange(0, BLOCK)
    inside = m < num_candidates
    of_m = f * num_candidates + m
    token = tl.load(tokens_ptr + of_m, mask=inside, other=0)
    logprob = tl.load(logprobs_ptr + of_m, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures_ptr + r)
    if temperature > 0:
        q = sampling_distribution(
            logprob, m, inside, temperature, r, top_k_ptr, top_p_ptr, min_p_ptr
        )
        tl.store(q_ptr + of_m, q, mask=inside)
        seed = tl.load(seeds_ptr + r)
        position = tl.load(roots_ptr + r) + SALT
        counter = (tl.load(columns_ptr + f) + 1) * MAX_CHILDREN
        one = tl.arange(0, 1)
        taken = m * 0
        reached = tl.full([1], 1.0, tl.float64)  # every earlier test rejects
        for k in range(num_children):
            u = murmur3_uniform64(seed, position, counter + k + one)
            # Rounding may end the sums a hair below u.
            last = tl.max(tl.where(q > 0, m, 0), 0)
            place = tl.sum((inside & (tl.cumsum(q, 0) <= u)).to(tl.int32), 0)
            place = tl.minimum(place, last)
            drawn = m == place
            chance = tl.sum(tl.where(drawn, q, 0.0), 0)
            left = tl.sum(tl.where(drawn, (q > 0).to(tl.int32), 0), 0)
            # A token that was drawn before shares its node.
            new = left - tl.sum(tl.where(drawn, taken, 0), 0)
            accepted = FLAT + (1 - FLAT) * chance
            score = tl.log(reached * accepted).to(tl.float32)
            to = f * num_children + k + one
            tl.store(scores_ptr + to, tl.where(new > 0, score, float("-inf")))
            child = left * tl.sum(tl.where(drawn, token, 0), 0)
            tl.store(children_ptr + to, child)
            place = tl.where(left > 0, place, NO_DRAW)
            tl.store(places_ptr + to, place.to(tl.int64))
            rejected = 1 - tl.minimum(accepted, 1 - 1e-6)
            reached = tl.where(new > 0, reached * rejected, reached)
            taken = tl.maximum(taken, tl.where(drawn, left, 0))
            if not REPLACES:
                q = tl.where(drawn, 0.0, q)
                total = tl.sum(q, 0)
                q = q / tl.where(total > 0, total, 1.0)
    else:
        of_child = f * num_children + m
        likeliest = m < num_children
        tl.store(scores_ptr + of_child, logprob, mask=likeliest)
        tl.store(children_ptr + of_child, token, mask=likeliest)
        tl.store(places_ptr + of_child, m.to(tl.int64) * 0 + NO_DRAW, mask=likeliest)
        tl.store(q_ptr + of_m, m.to(tl.float64) * 0, mask=inside)


def drawn_children(
    logprobs: torch.Tensor,
    tokens: torch.Tensor,
    seeds: torch.Tensor,
    roots: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    columns: torch.Tensor,
    k: int,
    replaces: bool,
) -> tuple[torch.Tensor, torch.Tensor, RowDraws]:
    """K draws of each row, or the likeliest at temperature 0.

    Args:
        logprobs: [F, M] float32 of the SSM, descending.
        tokens: [F, M] int64.
        seeds: [R] int64 of the requests' draws, as are the parameters below.
        roots: [R] int64 positions of the roots.
        temperatures: [R] float32.
        top_k: [R] int64.
        top_p: [R] float32.
        min_p: [R] float32.
        columns: [R, F / R] int64 of each row's node, `ROOT` for the root: no other node
            of its tree has it.
        k: K.
        replaces: A token may be drawn again.

    Returns:
        Scores [F, K] float32, -inf where there is no child, tokens [F, K] int64, and
        what tests of the draws need.
    """
    num_rows, num_candidates = logprobs.shape
    scores = logprobs.new_empty(num_rows, k)
    children = tokens.new_empty(num_rows, k)
    draws = RowDraws(
        torch.empty_like(children),
        tokens.contiguous(),
        logprobs.new_empty(num_rows, num_candidates, dtype=torch.float64),
    )
    _drawn_children_kernel[(num_rows,)](
        scores,
        children,
        draws.places,
        draws.q,
        logprobs.contiguous(),
        draws.tokens,
        seeds,
        roots,
        temperatures,
        top_k,
        top_p,
        min_p,
        columns,
        num_rows // len(seeds),
        num_candidates,
        k,
        REPLACES=replaces,
        FLAT=FLAT_ACCEPTANCE,
        SALT=DRAFT_NOISE_SALT,
        MAX_CHILDREN=MAX_CHILDREN,
        NO_DRAW=NO_DRAW,
        BLOCK=triton.next_power_of_2(max(k, num_candidates)),
    )
    return scores, children, draws
