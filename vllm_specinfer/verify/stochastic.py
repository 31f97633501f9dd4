"""Stochastic verification of drawn children: MSS and RRS, vectorised over requests.

The rules are those of `vllm_specinfer/verify/reference.py` (SpecInfer, arXiv
2305.09781, algorithm 2, and recursive rejection of draws without replacement).

Dimension legend: G requests at one level, V vocabulary, M candidates of a node's draws,
K draws.
"""

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.kernels.cpu.gumbel import DRAFT_NOISE_SALT, uniform
from vllm_specinfer.tree.proposals import NO_DRAW, Draws, stacked

# Plain draws use positions as they are, drafts one salt: the tests and the draws from
# what they leave have streams of their own.
_TEST_SALT = 2 * DRAFT_NOISE_SALT
_RESIDUAL_SALT = 3 * DRAFT_NOISE_SALT


def verify_draws(
    p: np.ndarray,
    draws: Draws,
    tests: np.ndarray,
    residuals: np.ndarray,
    replaces: bool,
) -> np.ndarray:
    """The next token of G nodes.

    Args:
        p: [G, V] the target's distributions, float64.
        draws: Of the G nodes.
        tests: [G, K] uniform numbers.
        residuals: [G] uniform numbers.
        replaces: The draws were independent (MSS), else without replacement (RRS).

    Returns:
        [G] int64 tokens, each distributed as p.
    """
    rows = np.arange(len(p))
    q = draws.q.copy()
    rest = p.copy()
    # A padded candidate's q is 0, whatever token it repeats.
    known = q > 0
    candidates = np.where(known, np.take_along_axis(p, draws.tokens, axis=1), 0.0)
    which, columns = np.nonzero(known)
    rest[which, draws.tokens[which, columns]] = 0
    # `p` is left unnormalised from here on, its sum is `mass`.
    outside = rest.sum(axis=1)
    tokens = np.full(len(p), NO_DRAW, np.int64)
    for place, u in zip(draws.places.T, tests.T, strict=True):
        tested = (tokens == NO_DRAW) & (place != NO_DRAW)
        if not tested.any():
            break
        mass = outside + candidates.sum(axis=1)
        accepted = tested & (u * q[rows, place] * mass < candidates[rows, place])
        tokens[accepted] = draws.tokens[rows, place][accepted]
        left = np.maximum(candidates - q * mass[:, None], 0)
        # Where p equals q but for rounding nothing may be left: then p stays.
        rejected = tested & ~accepted & (outside + left.sum(axis=1) > 0)
        candidates[rejected] = left[rejected]
        if not replaces:
            gone = np.flatnonzero(tested & ~accepted)
            q[gone, place[gone]] = 0
            total = q[gone].sum(axis=1, keepdims=True)
            q[gone] = np.divide(q[gone], total, out=q[gone], where=total > 0)
    for g in np.flatnonzero(tokens == NO_DRAW).tolist():
        rest[g, draws.tokens[g][known[g]]] = candidates[g][known[g]]
        sums = np.cumsum(rest[g])
        token = np.searchsorted(sums, residuals[g] * sums[-1], side="right")
        tokens[g] = min(int(token), int(np.flatnonzero(rest[g])[-1]))
    return tokens


class DrawTestingSampler(Sampler):
    """vLLM's sampler, but rows with drawn children take the token their tests give.

    It shares the states of the sampler it is made from, so processors and log
    probabilities are vLLM's own.
    """

    def __init__(self, sampler: Sampler, replaces: bool) -> None:
        """Share `sampler`; `replaces` as in `verify_draws`."""
        self.__dict__.update(sampler.__dict__)
        self._replaces = replaces
        self._draws: dict[int, Draws] = {}

    def expect(self, draws: dict[int, Draws]) -> None:
        """Say which logits rows of the next call have drawn children."""
        self._draws = draws

    def _sample_random(
        self,
        processed_logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        pos: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        use_fused_sampler: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Truncated once: the plain draws below then need not do it again.
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        sampled, processed_logits = super()._sample_random(
            processed_logits, expanded_idx_mapping, idx_mapping_np, pos, None, None,
            use_fused_sampler,
        )  # fmt: skip
        slots = expanded_idx_mapping.numpy()
        temperature = self.sampling_states.temperature.np
        rows = [r for r in self._draws if temperature[slots[r]] > 0]
        if rows:
            draws = stacked([self._draws[r] for r in rows])
            places = np.arange(draws.places.shape[1])
            keys = [
                (int(self.sampling_states.seeds.np[slots[r]]), int(pos[r]))
                for r in rows
            ]
            tests = [uniform(seed, at + _TEST_SALT, places) for seed, at in keys]
            residuals = [
                uniform(seed, at + _RESIDUAL_SALT, places[:1]) for seed, at in keys
            ]
            p = processed_logits[rows].double().softmax(dim=-1).numpy()
            tokens = verify_draws(
                p, draws, np.array(tests), np.concatenate(residuals), self._replaces
            )
            sampled[rows] = torch.from_numpy(tokens).to(sampled.dtype)
        return sampled, processed_logits
