"""Nodes that a tree may have, the union of what several sources propose, the best N.

Dimension legend: R requests, C candidates per request, N nodes of a tree.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specinfer.tree.token_tree import ROOT, TokenTree

# vLLM's own mark of a draft that is not one.
NO_TOKEN = -1


@dataclass(frozen=True)
class FinishedTrees:
    """R finished trees, likeliest nodes first.

    Attributes:
        tokens: [R, N] int64. Where a request has fewer than N nodes, the rest are
            children of the root with token `NO_TOKEN`.
        parents: [R, N] int32.
        scores: [R, N] float32 of the nodes; -inf where there is none.
        places: [R, C + 1] the node of each candidate, N where it is none; the last
            column stands for candidates that never were one.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    places: np.ndarray

    @classmethod
    def none(
        cls, num_reqs: int, num_nodes: int, num_candidates: int = 0
    ) -> "FinishedTrees":
        """R trees without a node."""
        shape = (num_reqs, num_nodes)
        return cls(
            np.full(shape, NO_TOKEN),
            np.full(shape, ROOT, np.int32),
            np.full(shape, -np.inf, np.float32),
            np.full((num_reqs, num_candidates + 1), num_nodes),
        )

    @functools.cached_property
    def sizes(self) -> list[int]:
        """[R] nodes of each tree."""
        return (self.tokens != NO_TOKEN).sum(axis=1).tolist()

    def each(self) -> Iterator[TokenTree]:
        """The trees one by one, without what is no node."""
        for tokens, parents, size in zip(
            self.tokens, self.parents, self.sizes, strict=True
        ):
            yield TokenTree(tokens[:size], parents[:size])


@dataclass(frozen=True)
class Candidates:
    """Proposed nodes of R trees.

    Attributes:
        tokens: [R, C] int64, distinct among siblings.
        parents: [R, C] int32, `ROOT` or an earlier candidate.
        scores: [R, C] float32 log of the estimated chance that verification reaches
            and accepts the node, never above its parent's; -inf where a column is none.
    """

    tokens: np.ndarray
    parents: np.ndarray
    scores: np.ndarray

    @classmethod
    def empty(cls, num_reqs: int, num_candidates: int = 0) -> "Candidates":
        """R trees with room for candidates, but none yet."""
        shape = (num_reqs, num_candidates)
        return cls(
            np.zeros(shape, np.int64),
            np.full(shape, ROOT, np.int32),
            np.full(shape, -np.inf, np.float32),
        )

    def beside(self, others: "Candidates") -> "Candidates":
        """More of the same trees; parents of `others` count from the first column."""
        return Candidates(
            # `np.hstack` takes six times as long.
            np.concatenate([self.tokens, others.tokens], axis=1),
            np.concatenate([self.parents, others.parents], axis=1),
            np.concatenate([self.scores, others.scores], axis=1),
        )

    def nth_score(self, n: int) -> np.ndarray:
        """[R] score of the n-th best candidate, -inf where there are fewer."""
        if self.scores.shape[1] < n:
            return np.full(len(self.scores), -np.inf, np.float32)
        return -np.partition(-self.scores, n - 1, axis=1)[:, n - 1]

    def raised(self, requests: np.ndarray, least: float) -> "Candidates":
        """Where these requests [R] bool have none with this score, the best is sure."""
        if not self.scores.shape[1]:
            return self
        rows, best = np.arange(len(self.scores)), self.scores.argmax(axis=1)
        scores = self.scores.copy()
        of_best = scores[rows, best]
        low = requests & np.isfinite(of_best) & (of_best < least)
        scores[rows[low], best[low]] = 0.0
        return Candidates(self.tokens, self.parents, scores)

    def cut(self, num_nodes: int) -> "Candidates":
        """Only the N best of each request; the columns stay what they are."""
        if self.scores.shape[1] <= num_nodes:
            return self
        order = np.argsort(-self.scores, axis=1, kind="stable")
        scores = self.scores.copy()
        np.put_along_axis(scores, order[:, num_nodes:], -np.inf, axis=1)
        return Candidates(self.tokens, self.parents, scores)

    def best(
        self, num_nodes: int, least: float = -np.inf, most: int | None = None
    ) -> FinishedTrees:
        """The trees of the N best candidates with a score of at least `least`.

        Ties are broken by age, so the order is topological and prefix-closed.

        Args:
            num_nodes: N.
            least: The lowest score of a node.
            most: Fewer nodes than N; None for N.
        """
        trees = FinishedTrees.none(len(self.tokens), num_nodes, self.tokens.shape[1])
        rows = np.arange(len(self.tokens))[:, None]
        order = np.argsort(-self.scores, axis=1, kind="stable")[:, :num_nodes][:, :most]
        nodes = np.arange(order.shape[1])
        scores = self.scores[rows, order]
        kept = np.isfinite(scores) & (scores >= least)
        trees.places[rows, order] = np.where(kept, nodes, num_nodes)
        parents = self.parents[rows, order]
        parents = np.where(parents == ROOT, ROOT, trees.places[rows, parents])
        trees.tokens[:, nodes] = np.where(kept, self.tokens[rows, order], NO_TOKEN)
        trees.parents[:, nodes] = np.where(kept, parents, ROOT)
        trees.scores[:, nodes] = np.where(kept, scores, -np.inf)
        return trees


def merge(sources: Sequence[Candidates]) -> tuple[Candidates, list[np.ndarray]]:
    """The trie union of several sources' candidates (SpecInfer, section 3).

    Nodes are shared by whole path. A node that several sources propose counts as
    accepted if any of them is right, each with the chance it gives by itself.

    Args:
        sources: [S] candidates of the same R requests, S >= 1.

    Returns:
        The union, and per source [R, C] which of its candidates each one became; the
        number of the union's columns where it was none.
    """
    if len(sources) == 1:
        (only,) = sources
        num_reqs, width = only.tokens.shape
        return only, [np.arange(width)[None].repeat(num_reqs, axis=0)]
    columns = [np.full(s.tokens.shape, -1) for s in sources]
    tries = []
    for r in range(len(sources[0].tokens)):
        trie: dict[tuple[int, int], int] = {}
        misses: list[float] = []
        for source, column in zip(sources, columns, strict=True):
            (found,) = np.isfinite(source.scores[r]).nonzero()
            chances = np.exp(source.scores[r, found].astype(np.float64)).tolist()
            tokens = source.tokens[r, found].tolist()
            parents = source.parents[r, found].tolist()
            own: dict[int, int] = {ROOT: ROOT}
            for c, token, parent, chance in zip(
                found.tolist(), tokens, parents, chances, strict=True
            ):
                node = own[c] = trie.setdefault((own[parent], token), len(trie))
                if node == len(misses):
                    misses.append(1.0)
                misses[node] *= 1 - chance
            column[r, found] = [own[c] for c in found.tolist()]
        tries.append((trie, misses))
    width = max((len(trie) for trie, _ in tries), default=0)
    union = Candidates.empty(len(tries), width)
    for r, (trie, misses) in enumerate(tries):
        if trie:
            n = len(trie)
            union.parents[r, :n], union.tokens[r, :n] = np.array(list(trie)).T
            union.scores[r, :n] = np.log1p(-np.array(misses))
    for column in columns:
        column[column < 0] = width
    return union, columns
