"""N-gram lookup where the host does not look on.

The definition is `Ngrams`. All shapes are fixed, so that captured graphs can do it. Not
yet run on a GPU.

Dimension legend: N nodes of a tree.
"""

import torch

from vllm_specinfer.drafting.device_lookup import DeviceLookup
from vllm_specinfer.drafting.text_copies import TextCopies
from vllm_specinfer.kernels.triton.matches import after_earliest_matches
from vllm_specinfer.options import NgramSource
from vllm_specinfer.tree.on_device import DeviceCandidates


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
        self.ends = list(range(1, num_nodes + 1))

    def find(self, slots: torch.Tensor, grows: torch.Tensor) -> DeviceCandidates:
        """As `DeviceSuffixes.find`; a chain per request."""
        lengths, (correction,) = self._copies.read(slots), self._correction.tensors
        limits = self._source.prompt_lookup_min, self._source.prompt_lookup_max
        texts = self._copies.tokens, slots, lengths, grows
        return after_earliest_matches(
            *texts, correction, limits, self.vocab_size, len(self.ends)
        )
