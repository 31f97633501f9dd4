"""Suffix lookup: what followed the longest match in this text, else in past ones.

An index chains the places where the same few tokens ended, newest first; extending a
match backwards from there finds what a suffix tree of bounded depth would.
"""

import heapq
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_specinfer.drafting.lookup import LookupNode, chance_after
from vllm_specinfer.options import SuffixSource
from vllm_specinfer.tree.token_tree import ROOT

if TYPE_CHECKING:
    from vllm_specinfer.drafting.device_suffix import DeviceSuffixes
    from vllm_specinfer.drafting.text_copies import TextCopies

# Shortest match within a request's own text, and in the texts of others.
MIN_OWN, MIN_PAST = 2, 3
# Longer matches are no better, and older places than this many hardly ever win.
MAX_MATCH, MAX_PLACES = 32, 16
# Others' texts predict less well: 0.36 after 2 tokens where the own text has 0.54,
# 0.46 for 0.65, 0.57 for 0.73, then alike (see `chance_after`).
PAST_TRUST = 0.75

# Behind each past text.
TEXT_END = -1

_NO_PLACE = -1
# Of a token in a run; no vocabulary has as many.
_BITS = 21
_TOKEN = (1 << _BITS) - 1


class TextIndex:
    """Tokens and where each run of `min_match` of them was seen."""

    def __init__(self, min_match: int) -> None:
        self.tokens = array("i")
        self._min_match = min_match
        self._newest: dict[int, int] = {}
        # By place: the place before it after the same run.
        self._older = array("i")
        # The last tokens as one number, as far as they make a run.
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        run, newest, older = self._last, self._newest, self._older
        mask = (1 << _BITS * self._min_match) - 1
        for place, token in enumerate(tokens, len(self.tokens)):
            # Place p is known by the run that ends just before it.
            if place >= self._min_match:
                older.append(newest.get(run, _NO_PLACE))
                newest[run] = place
            else:
                older.append(_NO_PLACE)
            run = (run << _BITS | token & _TOKEN) & mask
        self.tokens.extend(tokens)
        self._last = run

    def longest_match(self, context: Sequence[int]) -> tuple[int, list[int]]:
        """How long the longest match of the context's end is, and the places after it.

        Args:
            context: The last tokens of a text, at most `MAX_MATCH`.

        Returns:
            Its length, 0 where there is none, and places newest first.
        """
        length, places = 0, []
        tokens, m = self.tokens, self._min_match
        run, place = 0, _NO_PLACE
        if len(context) >= m:
            for token in context[-m:]:
                run = run << _BITS | token & _TOKEN
            place = self._newest.get(run, _NO_PLACE)
        for _ in range(MAX_PLACES):
            if place == _NO_PLACE:
                break
            n, most = m, min(len(context), place)
            while n < most and tokens[place - n - 1] == context[-n - 1]:
                n += 1
            if n > length:
                length, places = n, []
            if n == length:
                places.append(place)
            place = self._older[place]
        return length, places


class Suffixes:
    """The index of each running request, and of the last finished ones."""

    def __init__(self, source: SuffixSource, max_num_reqs: int, num_nodes: int) -> None:
        """Start without any text.

        Args:
            source: How many tokens of past texts are kept.
            max_num_reqs: Request slots.
            num_nodes: Most nodes of a tree.
        """
        self._num_nodes = num_nodes
        self._generation_size = max(1, source.max_tokens // 2)
        self._max_num_reqs = max_num_reqs
        self.forget()

    def forget(self) -> None:
        """Forget all texts; those of running requests are read again."""
        self._own = [TextIndex(MIN_OWN) for _ in range(self._max_num_reqs)]
        # The older one is dropped when the newer one is full.
        self._past = [TextIndex(MIN_PAST), TextIndex(MIN_PAST)]

    def end(self, slot: int, tokens: np.ndarray) -> None:
        """The slot's request leaves this text [n] int32 to others."""
        self._own[slot] = TextIndex(MIN_OWN)
        if not len(tokens):
            return
        text = [*tokens.tolist(), TEXT_END][-self._generation_size :]
        if len(self._past[0].tokens) + len(text) > self._generation_size:
            self._past = [TextIndex(MIN_PAST), self._past[0]]
        self._past[0].extend(text)

    def start(self, slot: int) -> None:
        """Begin anew; a text whose end was not told is kept as far as it was read."""
        self.end(slot, np.array(self._own[slot].tokens))

    def read(self, slot: int, tokens: np.ndarray) -> TextIndex:
        """The index of a request, which now has these tokens [n]."""
        own = self._own[slot]
        own.extend(tokens[len(own.tokens) :].tolist())
        return own

    def for_device(self, copies: "TextCopies") -> "DeviceSuffixes":
        """The same where the host does not look on; it begins without past texts."""
        # Its kernel needs Triton.
        from vllm_specinfer.drafting.device_suffix import DeviceSuffixes

        return DeviceSuffixes(copies, self._num_nodes, self._generation_size)

    def find(
        self, slot: int, tokens: np.ndarray, alone: bool = False
    ) -> Sequence[LookupNode]:
        """The tree of what followed the longest matches, by how often it did."""
        own = self.read(slot, tokens)
        context = own.tokens[-MAX_MATCH:].tolist()
        length, places = own.longest_match(context)
        if length:
            paths = [self._repeated(own.tokens, place) for place in places]
            return _tree(paths, length, 1.0, self._num_nodes)
        for past in () if alone else self._past:
            length, places = past.longest_match(context)
            if length:
                paths = [past.tokens[p : p + self._num_nodes] for p in places]
                return _tree(paths, length, PAST_TRUST, self._num_nodes)
        return []

    def _repeated(self, tokens: array, place: int) -> list[int]:
        """What follows a place; at the end of the text it goes on from there."""
        path = tokens[place : place + self._num_nodes].tolist()
        period = len(path)
        return (path * -(-self._num_nodes // period))[: self._num_nodes]


def _tree(
    paths: list[Sequence[int]], length: int, trust: float, num_nodes: int
) -> Sequence[LookupNode]:
    """The likeliest nodes of the trie of paths, newest first.

    A node's chance is the share of its parent's paths that go through it, times how
    often a match of so many tokens goes on.
    """
    nodes: list[LookupNode] = []
    # Nodes that could come next: -chance from the root, depth, the paths through it,
    # and what it would be. The paths of two nodes of a depth begin with different ones,
    # so nothing after them is compared.
    heap: list[tuple[float, int, list[int], LookupNode]] = []
    reached, depth, parent, through = 1.0, 0, ROOT, list(range(len(paths)))
    while True:
        children: dict[int, list[int]] = {}
        for number in through:
            path = paths[number]
            if depth < len(path) and path[depth] != TEXT_END:
                children.setdefault(path[depth], []).append(number)
        goes_on = chance_after(length + depth) * (1.0 if depth else trust)
        for token, own in children.items():
            chance = len(own) / len(through) * goes_on
            node = parent, token, chance
            heapq.heappush(heap, (-reached * chance, depth + 1, own, node))
        if not heap or len(nodes) == num_nodes:
            return nodes
        reached, depth, through, node = heapq.heappop(heap)
        reached, parent = -reached, len(nodes)
        nodes.append(node)
