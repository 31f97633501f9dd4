"""Growing the trees of a batch level by level.

Dimension legend: R requests, C candidate nodes per request, F frontier nodes of one
level over all requests, K children proposed per frontier node, N nodes of a tree,
W 64-bit words per bit row.
"""

import functools
from dataclasses import dataclass

import numpy as np

from vllm_specinfer.options import BestFirstTree, Tree
from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.tree.candidates import Candidates
from vllm_specinfer.tree.token_tree import ROOT, WORD_BITS, num_words

EVERYTHING = Worth()
_ONE = np.uint64(1)


@dataclass(frozen=True)
class Frontier:
    """Nodes whose children come next; one SSM pass runs them all.

    Attributes:
        requests: [F] index of the request, ascending.
        tokens: [F] int64.
        nodes: [F] the candidate each of them is.
        parents: [F] the row of the pass before that each is a child of.
        depth: Depth of all of them; the root's children have depth 1.
        scratch: [F] where the node's K/V goes: slots after the request's last token.
        ancestor_bits: [F, W] int64, the scratch slots each node sees.
    """

    requests: np.ndarray
    tokens: np.ndarray
    nodes: np.ndarray
    parents: np.ndarray
    depth: int
    scratch: np.ndarray
    ancestor_bits: np.ndarray


class TreeGrowth:
    """Candidates of R trees, from the root's children down.

    A best-first tree expands, at each level, the `max_width` likeliest new nodes that
    are among the N likeliest so far and not below a least probability; a node outside
    can never come back, because a child is no likelier than its parent. An expansion
    tree expands everything.
    """

    def __init__(
        self,
        tree: Tree,
        num_nodes: int,
        capacity: np.ndarray,
        max_depth: np.ndarray,
        least: np.ndarray,
        worth: Worth = EVERYTHING,
    ) -> None:
        """Start R empty trees.

        Args:
            tree: Their shape.
            num_nodes: Nodes to keep per tree (N).
            capacity: [R] scratch slots available per request.
            max_depth: [R] deepest node whose K/V may be written.
            least: [R] log of the probability below which a best-first tree does not
                expand a node.
            worth: Which of a level's nodes are expanded.
        """
        num_reqs = len(capacity)
        self._best_first = isinstance(tree, BestFirstTree)
        self._least = least[:, None]
        self._tree = tree
        self._num_nodes = num_nodes
        self._capacity = capacity
        self._max_depth = max_depth
        self._worth = worth
        self._depth = 0
        self._found: Candidates | None = None
        # [R, C, X] what `extend` was told of the candidates.
        self.features: np.ndarray | None = None
        self._words = level_words(tree, num_nodes)
        # The frontier, to begin with the roots. [R, F'] columns of candidates, which of
        # them are in it, and their rows in the next pass:
        self._columns = np.full((num_reqs, 1), ROOT, np.int32)
        self._mask = np.ones((num_reqs, 1), bool)
        self._rows = np.arange(num_reqs)[:, None]
        # By row: [F] scores, [F, W] what each one sees. And [R] slots in use.
        self._base = np.zeros(num_reqs, np.float32)
        self._bits = np.zeros((num_reqs, self._words), np.uint64)
        self._used = np.zeros(num_reqs, np.int32)

    @property
    def num_children(self) -> int:
        """Children wanted for each frontier node now (K)."""
        if self._best_first:
            return min(self._tree.max_width, self._num_nodes)
        return self._tree.widths[self._depth]

    def extend(
        self,
        logprobs: np.ndarray,
        tokens: np.ndarray,
        features: np.ndarray | None = None,
    ) -> Frontier | None:
        """Add the frontier's children and choose the next frontier.

        Args:
            logprobs: [F, K] log-probability of each child given its parent's path;
                -inf or NaN where there is none.
            tokens: [F, K] int64, distinct within a row where there is a child.
            features: [F, K, X] kept for later in `features`, in all calls or none.

        Returns:
            The nodes to run next, or None when the trees are done.
        """
        num_reqs, width = self._mask.shape
        num_new = width * logprobs.shape[1]
        first = 0 if self._found is None else self._found.tokens.shape[1]
        shape = (num_reqs, width, logprobs.shape[1])
        new_logprobs = np.full(shape, -np.inf, np.float32)
        scores = logprobs + self._base[:, None]
        new_logprobs[self._mask] = np.where(np.isnan(scores), -np.inf, scores)
        new_logprobs = new_logprobs.reshape(num_reqs, num_new)
        new_tokens = np.zeros((num_reqs, width, tokens.shape[1]), np.int64)
        new_tokens[self._mask] = tokens
        new_parents = np.repeat(self._columns, logprobs.shape[1], axis=1)
        if features is not None:
            new = np.zeros((num_reqs, width, *features.shape[1:]))
            new[self._mask] = features
            new = new.reshape(num_reqs, num_new, -1)
            known = [] if self.features is None else [self.features]
            self.features = np.concatenate([*known, new], axis=1)
        found = Candidates(
            new_tokens.reshape(num_reqs, num_new), new_parents, new_logprobs
        )
        self._found = found if self._found is None else self._found.beside(found)
        self._depth += 1
        if self._depth >= self._tree.max_depth:
            return None
        return self._advance(first, new_logprobs, logprobs.shape[1])

    def finish(self) -> Candidates:
        """The N best of all that was proposed."""
        if self._found is None:
            return Candidates.empty(len(self._capacity))
        return self._found.cut(self._num_nodes)

    def _advance(
        self, first: int, new_logprobs: np.ndarray, children: int
    ) -> Frontier | None:
        num_reqs, num_new = new_logprobs.shape
        rows = np.arange(num_reqs)[:, None]
        live = np.isfinite(new_logprobs)
        if self._best_first:
            live &= new_logprobs >= self._least
            live &= new_logprobs >= self._found.nth_score(self._num_nodes)[:, None]
            width = min(self.num_children, num_new)
            chosen = np.argsort(-new_logprobs, axis=1, kind="stable")[:, :width]
        else:
            chosen = np.broadcast_to(np.arange(num_new), (num_reqs, num_new))
        mask = live[rows, chosen] & (self._depth <= self._max_depth)[:, None]
        mask[mask] = self._worth.expands(new_logprobs[rows, chosen][mask])
        if not mask.any():
            return None
        scratch = self._used[:, None] + mask.cumsum(axis=1) - 1
        mask &= scratch < self._capacity[:, None]
        requests, places = np.nonzero(mask)
        if not len(requests):
            return None
        picked, where = chosen[requests, places], scratch[requests, places]
        parents = self._rows[requests, picked // children]
        bits, nodes = self._bits[parents], np.arange(len(requests))
        bits[nodes, where // WORD_BITS] |= _ONE << (where % WORD_BITS).astype(np.uint64)
        self._columns = (first + chosen).astype(np.int32)
        self._mask = mask
        self._rows = np.zeros(mask.shape, np.int64)
        self._rows[requests, places] = nodes
        self._base = new_logprobs[requests, picked]
        self._bits = bits
        self._used = self._used + mask.sum(axis=1, dtype=np.int32)
        return Frontier(
            requests=requests,
            tokens=self._found.tokens[requests, first + picked],
            nodes=(first + picked).astype(np.int32),
            parents=parents,
            depth=self._depth,
            scratch=where,
            ancestor_bits=bits.view(np.int64),
        )


def level_sizes(tree: Tree, num_nodes: int) -> tuple[int, ...]:
    """Most nodes of each level of a tree of N nodes whose children are asked for."""
    if isinstance(tree, BestFirstTree):
        return (min(tree.max_width, num_nodes),) * (tree.max_depth - 1)
    return tree.level_sizes[:-1]


@functools.cache
def level_words(tree: Tree, num_nodes: int) -> int:
    """64-bit words for a bit of each of these nodes (W)."""
    return num_words(max(sum(level_sizes(tree, num_nodes)), 1))
