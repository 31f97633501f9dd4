"""N-gram lookup where the host does not look on.

The definition is `Ngrams`. All shapes are fixed, so that captured graphs can do it. Not
yet run on a GPU.

Dimension legend: R requests, N nodes of a tree.
"""

import numpy as np
import torch

from vllm_specinfer.device import StagedBuffers
from vllm_specinfer.drafting.text_copies import TextCopies
from vllm_specinfer.kernels.triton.matches import earliest_matches
from vllm_specinfer.options import NgramSource
from vllm_specinfer.tree.on_device import DeviceCandidates
from vllm_specinfer.tree.token_tree import ROOT


class DeviceNgrams:
    """Nothing but the texts is kept between steps.

    Attributes:
        ends: Columns once the candidates of a depth are known: one per depth.
    """

    def __init__(self, copies: TextCopies, source: NgramSource, num_nodes: int) -> None:
        """Set the limits.

        Args:
            copies: Of all texts.
            source: The shortest and the longest match.
            num_nodes: Most tokens to propose (N).
        """
        self._copies, self._source = copies, source
        device = copies.tokens.device
        self._steps = torch.arange(num_nodes, device=device)
        self._correction = StagedBuffers(device, np.zeros(2, np.float32))
        self.ends = list(range(1, num_nodes + 1))

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        self._copies.start(slot)

    def forget(self) -> None:
        """There are no past texts."""

    def fill(self, correction: tuple[float, float]) -> None:
        """As `DeviceSuffixes.fill`."""
        self._correction.fill(np.array(correction, np.float32))

    def find(self, slots: torch.Tensor, grows: torch.Tensor) -> DeviceCandidates:
        """As `DeviceSuffixes.find`; a chain per request."""
        tokens = self._copies.tokens
        lengths = torch.where(grows, self._copies.read(slots), 0)
        matched, places = earliest_matches(
            tokens, slots, lengths, self._source.prompt_lookup_max
        )
        after = places[:, None] + self._steps
        there = (matched >= self._source.prompt_lookup_min)[:, None]
        there = there & (after < lengths[:, None])
        chain = tokens[slots[:, None], torch.where(there, after, 0)]
        # `chance_after`.
        chance = 1 - 1 / (matched[:, None] + self._steps).clamp_min(2).double()
        (correction,) = self._correction.tensors
        scores = (chance.log() * correction[0] - correction[1]).cumsum(dim=-1).float()
        parents = torch.where(self._steps > 0, self._steps - 1, ROOT)
        return DeviceCandidates(
            chain.long(),
            parents.expand_as(after).contiguous(),
            torch.where(there, scores, -torch.inf),
            self.ends,
        )
