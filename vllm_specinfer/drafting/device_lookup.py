"""What lookups share where the host does not look on."""

import numpy as np
import torch

from vllm_specinfer.device import StagedBuffers
from vllm_specinfer.drafting.text_copies import TextCopies


class DeviceLookup:
    """Looks up in the texts of running requests.

    Attributes:
        vocab_size: As of `LookupSource`; more than any token where it has none.
    """

    vocab_size = torch.iinfo(torch.int32).max

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

    def end(self, slot: int) -> None:
        """The request that leaves a slot leaves its text to others."""

    def forget(self) -> None:
        """Forget past texts."""

    def fill(self, correction: tuple[float, float], slots: np.ndarray) -> None:
        """Say what is looked up next.

        Args:
            correction: Of chances, `Calibration.line`.
            slots: [R] request slots.
        """
        self._correction.fill(np.array(correction, np.float32))
