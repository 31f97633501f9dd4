"""Stochastic verification of drawn children: MSS and RRS, vectorised over requests.

The rules are those of `vllm_specinfer/verify/reference.py` (SpecInfer, arXiv
2305.09781, algorithm 2, and recursive rejection of draws without replacement). Only the
candidates of the draws take part in the tests; what they leave of the target's
distribution is put into the logits, and vLLM's own sampler draws from it.

Dimension legend: G nodes, one per request, L logits rows, V vocabulary, M candidates of
a node's draws, K draws.
"""

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.kernels.cpu.gumbel import DRAFT_NOISE_SALT, uniform
from vllm_specinfer.tree.proposals import NO_CANDIDATE, NO_DRAW, Draws, stacked

# Plain draws use positions as they are, drafts one salt: the tests and the draws from
# what they leave have streams of their own.
TEST_SALT = 2 * DRAFT_NOISE_SALT
RESIDUAL_SALT = 3 * DRAFT_NOISE_SALT


def verify_draws(
    p: np.ndarray, draws: Draws, uniforms: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Test the draws of G nodes in their order.

    MSS and RRS are one rule: each draw is tested against what it was made from.

    Args:
        p: [G, M] the target's probabilities of the candidates, float64; anything where
            there is no candidate.
        draws: Of the G nodes.
        uniforms: [G, K] uniform numbers.

    Returns:
        [G] place of the accepted candidate, `NO_DRAW` where every test rejected, and
        [G, M] what the rejections leave of p, on the scale of p: all other tokens
        keep their probability, and nothing is normalised.
    """
    rows = np.arange(len(p))
    p = np.where(draws.tokens == NO_CANDIDATE, 0.0, p)
    outside = 1.0 - p.sum(axis=1)
    found = np.full(len(p), NO_DRAW, np.int64)
    for j in range(draws.places.shape[1]):
        place, q = draws.places[:, j], draws.q[:, j]
        tested = (found == NO_DRAW) & (place != NO_DRAW)
        if not tested.any():
            break
        mass = outside + p.sum(axis=1)
        accepted = uniforms[:, j] * q[rows, place] * mass < p[rows, place]
        accepted &= tested
        found[accepted] = place[accepted]
        left = np.maximum(p - q * mass[:, None], 0)
        # Where p equals q but for rounding nothing may be left: then p stays.
        rejected = tested & ~accepted & (outside + left.sum(axis=1) > 0)
        p[rejected] = left[rejected]
    return found, p


class DrawTestingSampler(Sampler):
    """vLLM's sampler, but rows with drawn children take the token their tests give.

    It shares the states of the sampler it is made from, so processors and log
    probabilities are vLLM's own.
    """

    def __init__(self, sampler: Sampler) -> None:
        """Share `sampler`."""
        self.__dict__.update(sampler.__dict__)
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
        # vLLM 0.33 has one more than 0.32.
        *flags: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        processed_logits = apply_top_k_top_p(processed_logits, top_k, top_p)
        slots = expanded_idx_mapping.numpy()
        sampled_rows = self.sampling_states.temperature.np[slots] > 0
        rows = [row for row in self._draws if sampled_rows[row]]
        logits, found = processed_logits, {}
        if rows:
            logits, found = self._tested(logits, rows, slots, pos)
            pos = pos.clone()
            pos[rows] += RESIDUAL_SALT
        sampled, _ = super()._sample_random(
            logits,
            expanded_idx_mapping,
            idx_mapping_np,
            pos,
            None,
            None,
            *flags,
        )
        for row, token in found.items():
            sampled[row] = token
        return sampled, processed_logits

    def _tested(
        self,
        logits: torch.Tensor,
        rows: list[int],
        slots: np.ndarray,
        pos: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[int, int]]:
        """Test the draws of these rows.

        Returns:
            [L, V] logits in which the rows hold what the tests leave, and the accepted
            token of each row that has one.
        """
        draws = stacked([self._draws[row] for row in rows])
        seeds = self.sampling_states.seeds.np[slots[rows]].tolist()
        counters = np.arange(draws.places.shape[1])
        uniforms = np.array(
            [
                uniform(seed, position + TEST_SALT, counters)
                for seed, position in zip(seeds, pos[rows].tolist(), strict=True)
            ]
        )
        chosen = logits[rows].double()
        total = chosen.logsumexp(dim=-1, keepdim=True)
        tokens = torch.from_numpy(draws.tokens)
        p = (chosen.gather(1, tokens.clamp(min=0)) - total).exp().numpy()
        places, left = verify_draws(p, draws, uniforms)
        logits = logits.to(torch.float32, copy=True)
        for g, row in enumerate(rows):
            known = tokens[g] != NO_CANDIDATE
            values = torch.from_numpy(left[g]).log() + total[g]
            logits[row, tokens[g][known]] = values[known].float()
        accepted = np.flatnonzero(places != NO_DRAW)
        found = draws.tokens[accepted, places[accepted]]
        return logits, {rows[g]: int(t) for g, t in zip(accepted, found, strict=True)}
