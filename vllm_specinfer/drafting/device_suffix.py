"""Suffix lookup where the host does not look on.

The definition is `Suffixes`. Here the texts are scanned instead of indexed, and all
shapes are fixed, so that captured graphs can do it.

Dimension legend: R requests, N nodes of a tree, G tokens per generation of past texts.
"""

import numpy as np
import torch

from vllm_specinfer.drafting.device_lookup import DeviceLookup
from vllm_specinfer.drafting.suffix import MAX_PLACES, TEXT_END
from vllm_specinfer.drafting.text_copies import TextCopies
from vllm_specinfer.kernels.triton.places import newest_places
from vllm_specinfer.kernels.triton.suffix_trees import suffix_trees
from vllm_specinfer.tree.on_device import DeviceCandidates


class DeviceSuffixes(DeviceLookup):
    """Past texts are kept here; those of running requests are in their copies.

    Attributes:
        ends: Columns once the candidates of a depth are known.
    """

    def __init__(
        self, copies: TextCopies, num_nodes: int, generation_size: int
    ) -> None:
        """Start without past texts.

        Args:
            copies: Of the texts of all slots.
            num_nodes: Most nodes of a tree (N).
            generation_size: Tokens of past texts, twice (G).
        """
        super().__init__(copies)
        self._num_nodes = num_nodes
        device = copies.tokens.device
        # The newer and the older generation; the last column is for padding.
        shape = 2, generation_size + 1
        self._past = torch.zeros(shape, dtype=torch.int32, device=device)
        self._filled = torch.zeros(2, dtype=torch.int64, device=device)
        # Slots whose text, still in vLLM's rows, is to be kept no more.
        self._forgotten: set[int] = set()
        self.ends = [MAX_PLACES * (1 + depth) for depth in range(num_nodes)]
        # A text and its end.
        width = min(copies.tokens.shape[1] + 1, generation_size)
        self._columns = torch.arange(width, device=device)

    @torch.inference_mode()  # as what has captured it
    def forget(self) -> None:
        """Forget all texts; those of running requests are looked up in again."""
        self._filled.zero_()
        self._forgotten = set(range(len(self._copies.texts.lengths)))

    def fill(self, correction: tuple[float, float], slots: np.ndarray) -> None:
        """Say what is looked up next."""
        super().fill(correction, slots)
        self._forgotten.difference_update(slots.tolist())

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        super().start(slot)
        self._forgotten.discard(slot)

    def end(self, slot: int) -> None:
        """Keep the text of the slot's request."""
        past, filled = self._past, self._filled
        size, width = past.shape[1] - 1, len(self._columns)
        texts = self._copies.texts
        length = texts.lengths[slot].long() * (slot not in self._forgotten)
        kept = (length + 1).clamp_max(width)
        is_full = filled[0] + kept > size
        past[1].copy_(torch.where(is_full, past[0], past[1]))
        filled[1].copy_(torch.where(is_full, filled[0], filled[1]))
        filled[0].masked_fill_(is_full, 0)
        text = texts.tokens[slot]
        source = length + 1 - kept + self._columns
        tokens = text[source.clamp_max(len(text) - 1)]
        tokens = torch.where(source < length, tokens, TEXT_END)
        places = torch.where(self._columns < kept, filled[0] + self._columns, size)
        past[0].scatter_(0, places, tokens.to(past.dtype))
        filled[0] += kept

    def find(self, slots: torch.Tensor, grows: torch.Tensor) -> DeviceCandidates:
        """What may follow the texts of R requests.

        Args:
            slots: [R] int64 request slots.
            grows: [R] bool; the others get no candidates.

        Returns:
            The N likeliest of each request; as many levels as nodes, a column per
            place.
        """
        lengths, (correction,) = self._copies.read(slots), self._correction.tensors
        texts = self._copies.tokens, self._past, self._filled, slots, lengths
        return suffix_trees(
            *newest_places(*texts, grows),
            *texts,
            correction,
            self.vocab_size,
            self._num_nodes,
        )
