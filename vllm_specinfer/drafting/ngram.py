"""What followed earlier matches of a text's end within the text: prompt lookup."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_specinfer.drafting.lookup import Lookup, LookupNode, chance_after
from vllm_specinfer.options import NgramSource
from vllm_specinfer.tree.token_tree import ROOT

if TYPE_CHECKING:
    from vllm_specinfer.drafting.device_ngram import DeviceNgrams
    from vllm_specinfer.drafting.text_copies import TextCopies


class Ngrams(Lookup):
    """What followed the earliest of the longest matches within the request's tokens.

    Finds what vLLM's method "ngram" finds (vllm/v1/spec_decode/ngram_proposer.py),
    without numba, whose compiled library breaks vLLM's start of a second CPU engine.
    """

    def __init__(self, source: NgramSource, max_depth: int) -> None:
        """Set the limits.

        Args:
            source: The shortest and the longest match.
            max_depth: Most tokens to propose.
        """
        self._source, self._max_depth = source, max_depth

    def for_device(self, copies: "TextCopies") -> "DeviceNgrams":
        """The same where the host does not look on."""
        # Its kernel needs Triton.
        from vllm_specinfer.drafting.device_ngram import DeviceNgrams

        return DeviceNgrams(copies, self._source, self._max_depth)

    def find(
        self, slot: int, tokens: np.ndarray, alone: bool = False
    ) -> Sequence[LookupNode]:
        """The chain of tokens after the match."""
        length, place = self._longest_match(tokens)
        if length < self._source.prompt_lookup_min:
            return []
        chain = tokens[place : place + self._max_depth].tolist()
        return [
            (depth - 1 if depth else ROOT, token, chance_after(length + depth))
            for depth, token in enumerate(chain)
        ]

    def _longest_match(self, tokens: np.ndarray) -> tuple[int, int]:
        """The length of the longest match and the first place after one."""
        places = np.arange(1, len(tokens))
        length = first = 0
        while length < self._source.prompt_lookup_max:
            places = places[places > length]
            places = places[tokens[places - length - 1] == tokens[-length - 1]]
            if not len(places):
                break
            length, first = length + 1, int(places[0])
        return length, first
