"""An EAGLE head as an SSM: it reads the target's hidden states beside the tokens.

Row r reads token r + 1 and the target's state of token r, and predicts token r + 2, as
in vLLM (vllm/v1/worker/gpu/spec_decode/eagle). The child of a node reads the head's own
state of its parent.

The target computes a token's state once, so what the head does not read at once is
kept until it does. Where a state is lost (a block of vLLM's prefix cache that the head
had not come to), zeros stand for it: the draft is worse, the output is the same.

Dimension legend: B requests of the batch, n tokens that the target ran and kept, F rows
of one pass, D width of what the head reads, H its hidden size.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.device import stage
from vllm_specinfer.drafting.graphs import Outputs
from vllm_specinfer.drafting.growth import Frontier
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.ssm import NeuralSSM


class EagleHead(NeuralSSM):
    """One EAGLE or EAGLE-3 head."""

    lookahead = 1
    reads_states = True

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        layer_names: set[str],
        device: torch.device,
        width: int,
    ) -> None:
        """Wrap a loaded head; `bind` must follow before it drafts.

        Args:
            model: vLLM's model of the head.
            vllm_config: The config to run forward passes under.
            layer_names: Its attention layers.
            device: The worker's device.
            width: Of what it reads of each token's states (D).
        """
        super().__init__(model, vllm_config, layer_names, device)
        self._width = width
        self._most_kept = self._scheduler_config.max_num_batched_tokens
        self._dtype = vllm_config.model_config.dtype
        # By slot: the states [rows, D] of its last rows, not yet read.
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._num_kept = 0

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; cached blocks may hold the head's K/V, too."""
        super().start(slot, request)
        self._pop(slot)

    def skip(self, step: DraftStep) -> None:
        """Keep the states of the step, or read them all once there are too many."""
        super().skip(step)
        for slot, states in _by_slot(step):
            self.keep(slot, states)
        if self.is_full():
            super().catch_up(step)
            # Of requests that wait or are gone.
            self._kept.clear()
            self._num_kept = 0

    def catch_up(self, step: DraftStep) -> torch.Tensor:
        """Run every token whose state the head has not read, ragged over the batch."""
        for slot, states in _by_slot(step):
            self._add(slot, states)
        return super().catch_up(step)

    def is_far_behind(self, step: DraftStep) -> bool:
        """Never: what it has not read is kept, and bounded by that."""
        return False

    def is_full(self, num_more: int = 0) -> bool:
        """With so many rows more, more are kept than should be: it is time to read."""
        return self._num_kept + num_more > self._most_kept

    def keep(self, slot: int, states: torch.Tensor) -> None:
        """The target's states [n, D] of a slot's next tokens are to be read later.

        They are copied: a view would keep those of all requests of its step.
        """
        self._add(slot, states.clone())

    def _add(self, slot: int, states: torch.Tensor) -> None:
        self._kept.setdefault(slot, []).append(states)
        self._num_kept += len(states)

    def _pop(self, slot: int) -> list[torch.Tensor]:
        kept = self._kept.pop(slot, [])
        self._num_kept -= sum(map(len, kept))
        return kept

    def _states(self, slots: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        parts = []
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            kept = self._pop(slot)
            lost = count - sum(map(len, kept))
            parts += [self.target_states(lost), *kept]
        return self.combined(torch.cat(parts))

    def target_states(self, num_rows: int) -> torch.Tensor:
        """[F, D] zeros."""
        return torch.zeros(num_rows, self._width, dtype=self._dtype, device=self.device)

    def combined(self, states: torch.Tensor) -> torch.Tensor:
        """[F, H] of [F, D]: EAGLE-3 mixes the states of several layers."""
        combine = getattr(self.model, "combine_hidden_states", None)
        return states if combine is None else combine(states)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
    ) -> Outputs:
        return self.model(input_ids, positions, states)

    def _taken(self, outputs: Outputs) -> torch.Tensor:
        hidden, self.own_states = outputs
        return hidden

    def no_states(self, num_rows: int) -> torch.Tensor:
        """[F, H] zeros."""
        return self.combined(self.target_states(num_rows))

    def _states_of_parents(self, frontier: Frontier) -> torch.Tensor:
        return self.own_states[stage(self.device, frontier.parents)[0]]

    def _last(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        self.own_states = self.own_states[rows]
        return hidden[rows]


def _by_slot(step: DraftStep) -> Iterator[tuple[int, torch.Tensor]]:
    """Request slots, and the target's states [n, D] of what the step has computed."""
    counts = np.diff(step.state_starts).tolist()
    return zip(step.slots.tolist(), step.states.split(counts), strict=True)
