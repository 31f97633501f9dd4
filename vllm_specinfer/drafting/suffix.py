"""Suffix lookup: what followed the longest match in this text, else in past ones.

An index chains the places where the same few tokens ended, newest first; extending a
match backwards from there finds what a suffix tree of bounded depth would.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from vllm_specinfer.drafting.lookup import LookupNode, chance_after
from vllm_specinfer.options import SuffixSource
from vllm_specinfer.tree.token_tree import ROOT

# Shortest match within a request's own text, and in the texts of others.
MIN_OWN, MIN_PAST = 2, 3
# Longer matches are no better, and older places than this many hardly ever win.
MAX_MATCH, MAX_PLACES = 32, 16
# Others' texts predict less well: 0.36 after 2 tokens where the own text has 0.54,
# 0.46 for 0.65, 0.57 for 0.73, then alike (see `chance_after`).
PAST_TRUST = 0.75

_NO_PLACE = -1
_TEXT_END = -1


class TextIndex:
    """Tokens and where each run of `min_match` of them was seen."""

    def __init__(self, min_match: int) -> None:
        self.tokens = array("i")
        self._min_match = min_match
        self._newest: dict[tuple[int, ...], int] = {}
        # By place: the place before it after the same run.
        self._older = array("i")

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        m, first = self._min_match, len(self.tokens)
        self.tokens.extend(tokens)
        self._older.extend([_NO_PLACE] * len(tokens))
        # Place p is known by the run that ends just before it.
        for place in range(max(first, m), len(self.tokens)):
            run = tuple(self.tokens[place - m : place])
            self._older[place] = self._newest.get(run, _NO_PLACE)
            self._newest[run] = place

    def longest_match(self, context: Sequence[int]) -> tuple[int, list[int]]:
        """How long the longest match of the context's end is, and the places after it.

        Args:
            context: The last tokens of a text, at most `MAX_MATCH`.

        Returns:
            Its length, 0 where there is none, and places newest first.
        """
        length, places = 0, []
        tokens, m = self.tokens, self._min_match
        place = self._newest.get(tuple(context[-m:]), _NO_PLACE)
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

    def __init__(self, source: SuffixSource, max_num_reqs: int, max_depth: int) -> None:
        """Start without any text.

        Args:
            source: How many tokens of past texts are kept.
            max_num_reqs: Request slots.
            max_depth: Most tokens of one path.
        """
        self._max_depth = max_depth
        self._generation_size = max(1, source.max_tokens // 2)
        self._max_num_reqs = max_num_reqs
        self.forget()

    def forget(self) -> None:
        """Forget all texts; those of running requests are read again."""
        self._own = [TextIndex(MIN_OWN) for _ in range(self._max_num_reqs)]
        # The older one is dropped when the newer one is full.
        self._past = [TextIndex(MIN_PAST), TextIndex(MIN_PAST)]

    def start(self, slot: int) -> None:
        """Keep the text of the slot's last request, and begin anew."""
        text = [*self._own[slot].tokens, _TEXT_END][-self._generation_size :]
        if len(self._past[0].tokens) + len(text) > self._generation_size:
            self._past = [TextIndex(MIN_PAST), self._past[0]]
        self._past[0].extend(text)
        self._own[slot] = TextIndex(MIN_OWN)

    def find(self, slot: int, tokens: np.ndarray) -> Sequence[LookupNode]:
        """The tree of what followed the longest matches, by how often it did."""
        own = self._own[slot]
        own.extend(tokens[len(own.tokens) :].tolist())
        context = own.tokens[-MAX_MATCH:].tolist()
        length, places = own.longest_match(context)
        if length:
            paths = [self._repeated(own.tokens, place) for place in places]
            return _tree(paths, length, 1.0)
        for past in self._past:
            length, places = past.longest_match(context)
            if length:
                paths = [past.tokens[p : p + self._max_depth] for p in places]
                return _tree(paths, length, PAST_TRUST)
        return []

    def _repeated(self, tokens: array, place: int) -> list[int]:
        """What follows a place; at the end of the text it goes on from there."""
        path = tokens[place : place + self._max_depth].tolist()
        period = len(path)
        return (path * -(-self._max_depth // period))[: self._max_depth]


def _tree(
    paths: list[Sequence[int]], length: int, trust: float
) -> Sequence[LookupNode]:
    """The trie of paths, newest first; a node's share is the paths through it."""
    nodes: list[LookupNode] = []
    # The paths that go through a node, from the root down, level by level.
    level = [(ROOT, paths)]
    depth = 0
    while level:
        below = []
        for parent, through in level:
            children: dict[int, list[Sequence[int]]] = {}
            for path in through:
                if depth < len(path) and path[depth] != _TEXT_END:
                    children.setdefault(path[depth], []).append(path)
            for token, own in children.items():
                share = len(own) / len(through) * chance_after(length + depth)
                below.append((len(nodes), own))
                nodes.append((parent, token, share if depth else trust * share))
        level = below
        depth += 1
    return nodes
