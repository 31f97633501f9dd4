"""Texts in the device's memory, for lookups that scan them in every step.

Dimension legend: S request slots, R requests.
"""

from typing import NamedTuple

import torch

from vllm_specinfer.kernels.triton.texts import catch_up


class Texts(NamedTuple):
    """The texts of all slots, on the device.

    Attributes:
        tokens: [S, max_model_len] int32.
        lengths: [S] int32.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor


class TextCopies:
    """vLLM's texts lie in the host's memory; what is new is copied when it is read.

    Attributes:
        texts: vLLM's.
        tokens: [S, max_model_len] int32 of the copies.
    """

    def __init__(self, texts: Texts) -> None:
        """Nothing is copied yet."""
        self.texts = texts
        device = texts.tokens.device
        self.tokens = torch.zeros_like(texts.tokens, device=device)
        self._known = torch.zeros(len(self.tokens), dtype=torch.int64, device=device)

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        self._known[slot].zero_()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """[R] int64 lengths of these texts, which are copied as far as they are."""
        return catch_up(self.tokens, self._known, *self.texts, slots)
