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

from vllm_specinfer.device import read, stage
from vllm_specinfer.noise import DRAFT_NOISE_SALT, uniform
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
        self._slots = np.empty(0, np.int64)

    def expect(self, draws: dict[int, Draws], slots: np.ndarray) -> None:
        """Say what the rows of the next call are.

        Args:
            draws: By logits row the children drawn below it, where there are any.
            slots: [L] request slot of each row.
        """
        self._draws, self._slots = draws, slots

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
        is_sampled = self.sampling_states.temperature.np[self._slots] > 0
        rows = np.array([row for row in self._draws if is_sampled[row]], np.int64)
        logits = processed_logits
        if len(rows):
            (places,) = stage(pos.device, rows)
            logits, found = self._tested(logits, rows, places, pos)
            pos = pos.clone()
            pos[places] += RESIDUAL_SALT
        sampled, _ = super()._sample_random(
            logits,
            expanded_idx_mapping,
            idx_mapping_np,
            pos,
            None,
            None,
            # Fused samplers would cut the logits again.
            *(False for _ in flags),
        )
        if len(rows):
            sampled[places] = torch.where(found >= 0, found, sampled[places])
        return sampled, processed_logits

    def _tested(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        places: torch.Tensor,
        pos: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Test the draws of these rows.

        Args:
            logits: [L, V].
            rows: [G] rows with draws.
            places: [G] the same, beside the logits.
            pos: [L] positions.

        Returns:
            [L, V] logits in which the rows hold what the tests leave, and [G] the token
            that each row accepts, -1 where it accepts none.
        """
        device = logits.device
        draws = stacked([self._draws[row] for row in rows.tolist()])
        (tokens,) = stage(device, draws.tokens)
        chosen = logits[places].double()
        total = chosen.logsumexp(dim=-1, keepdim=True)
        logits = logits.to(torch.float32, copy=True)
        p, positions = read(
            (chosen.gather(1, tokens.clamp(min=0)) - total).exp(), pos[places]
        )
        seeds = self.sampling_states.seeds.np[self._slots[rows]]
        counters = np.indices(draws.places.shape)[1]
        uniforms = uniform(seeds, positions + TEST_SALT, counters)
        chosen_places, left = verify_draws(p, draws, uniforms)
        accepted = draws.tokens[np.arange(len(rows)), chosen_places]
        accepted = np.where(chosen_places == NO_DRAW, -1, accepted)
        g, m = np.nonzero(draws.tokens != NO_CANDIDATE)
        left, g, m, known_rows, found = stage(device, left, g, m, rows[g], accepted)
        values = (left.log() + total).float()
        logits[known_rows, tokens[g, m]] = values[g, m]
        return logits, found
