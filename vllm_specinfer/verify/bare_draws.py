"""Rows that ask for nothing but a draw at some temperature, or for the likeliest token.

What vLLM's sampler does besides takes several times as long as the draw.

Dimension legend: G rows that are drawn at once, L logits rows of a step, V vocabulary.
"""

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_specinfer.device import stage
from vllm_specinfer.verify.chains import looks_back

UNKNOWN = -1


class BareDraws:
    """Tokens by logits, temperature and noise alone: those of vLLM's sampler."""

    def __init__(self, sampler: Sampler, tests_draws: bool) -> None:
        """Draw as `sampler`.

        Args:
            sampler: vLLM's.
            tests_draws: As `DraftStep.tests_draws`.
        """
        self._sampler, self._tests_draws = sampler, tests_draws
        # By slot what `suffice` found of its request.
        self._answers = np.full(len(sampler.needs_logits_processing), UNKNOWN, np.int8)

    def start(self, slot: int) -> None:
        """Another request is in this slot."""
        self._answers[slot] = UNKNOWN

    def suffice(self, slots: np.ndarray) -> bool:
        """Whether the requests in these slots ask for nothing else."""
        answers = self._answers[slots].tolist()
        if UNKNOWN in answers:
            for slot in slots[self._answers[slots] == UNKNOWN]:
                self._answers[slot] = self._suffice_for(slot)
            answers = self._answers[slots].tolist()
        return all(answers)

    def _suffice_for(self, slot: int) -> bool:
        """What `suffice` asks of one request; the answer never changes."""
        sampler, states = self._sampler, self._sampler.sampling_states
        slots = np.array([slot])
        if sampler.compute_nans or sampler.get_logprobs_dims(slots) is not None:
            return False
        if not states.temperature.np[slot]:
            return not sampler.needs_logits_processing[slot]
        bias = sampler.logits_processors[0]
        return not (
            self._tests_draws
            or states.min_p.np[slot]
            or states.top_k.np[slot] != states.vocab_size
            or states.top_p.np[slot] != 1
            or bias.use_logit_bias[slot]
            or looks_back(sampler, slots)[0]
        )

    def draw(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        positions: torch.Tensor,
        slots: np.ndarray,
        rows: np.ndarray,
    ) -> torch.Tensor:
        """Draw for some rows.

        Args:
            logits: [L, V].
            batch: The step's batch.
            positions: [n] those of its rows.
            slots: [G] request slots.
            rows: [G] of `logits`, rising.

        Returns:
            [G, 1] tokens.
        """
        if not self._sampler.sampling_states.temperature.np[slots].any():
            return self._argmax(logits, rows)
        places, mapping = stage(logits.device, rows, slots)
        whole = np.array_equal(rows, np.arange(len(logits)))
        tokens = self._sampled(
            logits if whole else logits[places],
            mapping,
            positions[batch.logits_indices[places]],
        )
        return tokens[:, None]

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compile the draw: requests of vLLM's warm-up ask for more than a draw.

        Args:
            logits: [G, V] as the target gives them.
        """
        zeros = np.zeros(len(logits), np.int64)
        mapping, positions = stage(logits.device, zeros, zeros)
        for rows in (logits, logits.contiguous()):  # some of them lie apart
            self._sampled(rows, mapping, positions)

    def _sampled(
        self, logits: torch.Tensor, mapping: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """[G] tokens of rows [G, V] at the temperatures of their slots [G]."""
        states = self._sampler.sampling_states
        return gumbel_sample(
            logits,
            mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=True,
            is_drafting=False,
        )

    def _argmax(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """[G, 1] likeliest tokens of rows; ties go to the lowest id, as in vLLM."""
        # NumPy's argmax over a vocabulary is several times quicker than torch's, and
        # than copying it.
        best = [logits[row].float().numpy().argmax() for row in rows.tolist()]
        return torch.from_numpy(np.array(best)[:, None])


class DeviceBareDraws(BareDraws):
    """The same where the host is not the device."""

    def _argmax(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        if len(rows) == len(logits):  # they rise
            return logits.argmax(dim=-1, keepdim=True)
        (places,) = stage(logits.device, rows)
        if len(rows) * 2 < len(logits):
            return logits[places].argmax(dim=-1)[:, None]
        # Nearly all are asked for, and a gather would copy them.
        return logits.argmax(dim=-1)[places, None]
