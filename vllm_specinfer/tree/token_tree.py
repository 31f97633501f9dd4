"""Token trees as flat arrays (SpecInfer, arXiv 2305.09781, section 3).

Dimension legend: N nodes of one tree without its root, W 64-bit words per row.

The root is the last verified token; it is implicit and numbered 0 in *rows*
(row 0 = root, row i + 1 = node i). Nodes are stored in a topological, prefix-closed
order: every parent precedes its children, so any prefix of the node list is a tree.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

ROOT = -1
# The parent of what is no node, as the device pads trees: no walk comes to it.
NO_NODE = -2
WORD_BITS = 64


def num_words(num_rows: int) -> int:
    """64-bit words that hold one bit per row."""
    return max(1, -(-num_rows // WORD_BITS))


@dataclass(frozen=True)
class TokenTree:
    """One tree of speculated tokens.

    Attributes:
        tokens: [N] int64, the token of each node.
        parents: [N] int32, index of the parent node; `ROOT` for the root's children;
            `NO_NODE` behind the last node, where more rows are scheduled than it has.
    """

    tokens: np.ndarray
    parents: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[int], parents: Sequence[int]) -> "TokenTree":
        """The tree of these nodes."""
        return cls(np.array(tokens, np.int64), np.array(parents, np.int32))

    def __len__(self) -> int:
        return len(self.tokens)

    def leaf_paths(self) -> Iterator[list[int]]:
        """The nodes from below the root down to each leaf; what is no node is none."""
        parents = self.parents.tolist()
        inner = set(parents)
        for leaf, parent in enumerate(parents):
            if leaf not in inner and parent != NO_NODE:
                path, node = [], leaf
                while node != ROOT:
                    path.append(node)
                    node = parents[node]
                yield path[::-1]


def node_depths(parents: np.ndarray) -> np.ndarray:
    """Depths of all rows of several trees of equal size.

    Args:
        parents: [R, N] int32, `ROOT` or the index of an earlier node.

    Returns:
        [R, N + 1] int32; row 0 is the root with depth 0.
    """
    # Trees are small: a loop over them takes a fifth of what NumPy takes by node.
    found = []
    for tree in parents.tolist():
        depths = [0]
        for parent in tree:
            depths.append(depths[parent + 1] + 1)
        found.append(depths)
    return np.array(found, np.int32).reshape(len(parents), parents.shape[1] + 1)


def ancestor_bits(parents: np.ndarray) -> np.ndarray:
    """The topology-aware causal mask as bit rows, for any number of nodes.

    Args:
        parents: [R, N] int32, `ROOT` or the index of an earlier node.

    Returns:
        [R, N + 1, W] int64: bit j % 64 of word j // 64 in row i is set when row j
        is an ancestor of row i, or i itself.
    """
    words, found = num_words(parents.shape[1] + 1), []
    for tree in parents.tolist():
        seen = [1]
        for row, parent in enumerate(tree, start=1):
            seen.append(seen[parent + 1] | 1 << row)
        found += [bits.to_bytes(words * WORD_BITS // 8, "little") for bits in seen]
    rows = np.frombuffer(b"".join(found), "<i8")
    return rows.reshape(len(parents), parents.shape[1] + 1, words)


@functools.cache
def chain_bits(num_rows: int, words: int) -> np.ndarray:
    """[num_rows, words] int64: the lower triangle, an ordinary causal mask.

    The same array each time, which nobody writes to.
    """
    seen = np.arange(1, num_rows + 1)[:, None] - np.arange(words) * WORD_BITS
    partly = (np.int64(1) << seen.clip(0, WORD_BITS - 1)) - 1
    return np.where(seen < WORD_BITS, partly, -1)
