"""Stochastic verification of drawn children: MSS and RRS, vectorised over requests.

The rules are those of `vllm_specinfer/verify/reference.py` (SpecInfer, arXiv
2305.09781, algorithm 2, and recursive rejection of draws without replacement). Only the
candidates of the draws take part in the tests; what they leave of the target's
distribution is put into the logits, and vLLM's own sampler draws from it.

Dimension legend: G nodes, one per request, L logits rows, V vocabulary, M candidates of
a node's draws, K draws.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import read, stage
from vllm_specinfer.noise import DRAFT_NOISE_SALT, uniform
from vllm_specinfer.tree.proposals import NO_CANDIDATE, NO_DRAW, Draws
from vllm_specinfer.verify.processed import ProcessedSampler

# Plain draws use positions as they are, drafts one salt: the tests and the draws from
# what they leave have streams of their own.
TEST_SALT = 2 * DRAFT_NOISE_SALT
RESIDUAL_SALT = 3 * DRAFT_NOISE_SALT

# Gives the draws below some rows [g], by their places among all that may have some.
DrawsOfRows = Callable[[np.ndarray], Any]


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


class DrawTestingSampler(ProcessedSampler, Sampler):
    """Rows with drawn children take the token their tests give.

    `seams.py` finds what is overridden by the class of vLLM's that is named here.
    """

    def __init__(self, sampler: Sampler) -> None:
        """Share `sampler`."""
        super().__init__(sampler)
        self._rows = self._slots = np.empty(0, np.int64)
        self._draws_of: DrawsOfRows | None = None

    def expect(
        self, rows: np.ndarray, draws_of: DrawsOfRows, slots: np.ndarray
    ) -> None:
        """Say what the rows of the next call are.

        Args:
            rows: Those [g] of the L below which children may have been drawn.
            draws_of: Gives those of some of them.
            slots: [L] request slot of each logits row.
        """
        self._rows, self._draws_of, self._slots = rows, draws_of, slots

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
        temperatures = self.sampling_states.temperature.np[self._slots[self._rows]]
        sampled_rows = np.flatnonzero(temperatures)
        rows, logits = self._rows[sampled_rows], processed_logits
        if len(rows):
            (places,) = stage(pos.device, rows)
            draws = self._draws_of(sampled_rows)
            logits, found, salts = self._tested(logits, rows, draws, places, pos)
            pos = pos.clone()
            pos[places] += salts
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
        draws: Draws,
        places: torch.Tensor,
        pos: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]:
        """Test the draws of these rows.

        Args:
            logits: [L, V].
            rows: [G] rows with draws.
            draws: Theirs.
            places: [G] the same rows, beside the logits.
            pos: [L] positions.

        Returns:
            [L, V] logits in which the rows hold what the tests leave, [G] the token
            that each row accepts, -1 where it accepts none, and [G] or one for all the
            salt of the draws from what is left.
        """
        device = logits.device
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
        return logits, found, RESIDUAL_SALT
