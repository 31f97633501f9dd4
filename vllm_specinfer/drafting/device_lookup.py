"""What lookups share where the host does not look on.

Dimension legend: N nodes of a path.
"""

import numpy as np
import torch

from vllm_specinfer.device import StagedBuffers
from vllm_specinfer.drafting.text_copies import TextCopies


class DeviceLookup:
    """Looks up in the texts of running requests.

    Attributes:
        vocab_size: As of `LookupSource`.
    """

    vocab_size: int | None = None

    def __init__(self, copies: TextCopies) -> None:
        """Correct nothing yet.

        Args:
            copies: Of the texts of all slots.
        """
        self._copies = copies
        device = copies.tokens.device
        self._correction = StagedBuffers(device, np.zeros(2, np.float32))

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        self._copies.start(slot)

    def forget(self) -> None:
        """Forget past texts."""

    def fill(self, correction: tuple[float, float], slots: np.ndarray) -> None:
        """Say what is looked up next.

        Args:
            correction: Of chances, `Calibration.line`.
            slots: [R] request slots.
        """
        self._correction.fill(np.array(correction, np.float32))

    def _known(self, tokens: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        """Which nodes of paths [..., N] are there, without tokens beyond the vocabulary
        and what is below them."""
        if self.vocab_size is None:
            return there
        return (there & (tokens < self.vocab_size)).int().cumprod(dim=-1).bool()

    def _scores(self, chances: torch.Tensor) -> torch.Tensor:
        """[..., N] float32 of nodes on paths, given the chance [..., N] float64 of each
        where its parent is."""
        (correction,) = self._correction.tensors
        logs = chances.log() * correction[0] - correction[1]
        return logs.cumsum(dim=-1).float()
