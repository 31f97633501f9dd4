"""N-gram lookup where the host does not look on.

The definition is `Ngrams`. All shapes are fixed, so that captured graphs can do it. Not
yet run on a GPU.

Dimension legend: R requests, N nodes of a tree.
"""

import torch

from vllm_specinfer.drafting.device_lookup import DeviceLookup
from vllm_specinfer.drafting.text_copies import TextCopies
from vllm_specinfer.kernels.triton.matches import earliest_matches
from vllm_specinfer.options import NgramSource
from vllm_specinfer.tree.on_device import DeviceCandidates
from vllm_specinfer.tree.token_tree import ROOT


class DeviceNgrams(DeviceLookup):
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
        super().__init__(copies)
        self._source = source
        self._steps = torch.arange(num_nodes, device=copies.tokens.device)
        self.ends = list(range(1, num_nodes + 1))

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
        there = self._known(chain, there)
        # `chance_after`.
        chance = 1 - 1 / (matched[:, None] + self._steps).clamp_min(2).double()
        parents = torch.where(self._steps > 0, self._steps - 1, ROOT)
        return DeviceCandidates(
            chain.long(),
            parents.expand_as(after).contiguous(),
            torch.where(there, self._scores(chance), -torch.inf),
        )
