"""Token trees of paths, and what tests ask of a tree."""

from collections.abc import Iterable

import numpy as np

from vllm_specinfer.tree.token_tree import ROOT, TokenTree, ancestor_bits, node_depths


def tree_of(paths: Iterable[Iterable[int]]) -> TokenTree:
    """The trie union of token paths that start below the root.

    Nodes are shared by whole path, never by (token, depth) alone.
    """
    nodes: dict[tuple[int, int], int] = {}
    for path in paths:
        node = ROOT
        for token in path:
            node = nodes.setdefault((node, int(token)), len(nodes))
    parents, tokens = np.array(list(nodes), np.int64).reshape(-1, 2).T
    return TokenTree(tokens, parents.astype(np.int32))


def depths_of(tree: TokenTree) -> np.ndarray:
    """[N] int32: 1 for the root's children."""
    return node_depths(tree.parents[None])[0, 1:]


def bits_of(tree: TokenTree) -> np.ndarray:
    """[N + 1, W] int64: bit j of row i says whether row i sees row j."""
    return ancestor_bits(tree.parents[None])[0]


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    tokens = []
    while node != ROOT:
        tokens.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return tokens[::-1]


def paths_in(tree: TokenTree) -> list[tuple[int, ...]]:
    """Those to each node."""
    return [tuple(path_to(tree, node)) for node in range(len(tree))]


def check(tree: TokenTree) -> None:
    """Raises ValueError unless the arrays describe a tree in flat order."""
    if len(tree.tokens) != len(tree.parents):
        raise ValueError(
            "tokens and parents must have one entry per node; "
            f"got {len(tree.tokens)} and {len(tree.parents)}"
        )
    if not ((tree.parents >= ROOT) & (tree.parents < np.arange(len(tree)))).all():
        raise ValueError(
            f"every parent must precede its child; got {tree.parents.tolist()}"
        )
    siblings = set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    if len(siblings) != len(tree):
        raise ValueError("siblings must hold distinct tokens")


def first_nodes(tree: TokenTree, num_nodes: int) -> TokenTree:
    """The tree of these."""
    return TokenTree(tree.tokens[:num_nodes], tree.parents[:num_nodes])
