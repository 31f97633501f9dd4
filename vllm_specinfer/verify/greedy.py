"""Greedy verification (SpecInfer, arXiv 2305.09781, algorithm 2, VerifyGreedy)."""

import numpy as np

from vllm_specinfer.tree.token_tree import ROOT


def walk(
    tokens: np.ndarray, parents: np.ndarray, choices: np.ndarray
) -> tuple[list[int], list[int]]:
    """Follow the target's choices down one tree.

    Args:
        tokens: [n] token of each scheduled node.
        parents: [n] parent of each node, `ROOT` or an earlier node.
        choices: [n + 1] the target's token after the root (row 0) and after each
            node (row i + 1).

    Returns:
        The accepted rows from the root's child down (row i + 1 = node i), and the
        emitted tokens: one per accepted row, then the bonus or correction token.
    """
    # Parents precede children, so one pass in flat order is the whole walk.
    at, path = ROOT, []
    node_tokens, node_parents = tokens.tolist(), parents.tolist()
    chosen = choices.tolist()
    for node, (token, parent) in enumerate(zip(node_tokens, node_parents, strict=True)):
        if parent == at and token == chosen[at + 1]:
            at = node
            path.append(node + 1)
    return path, [chosen[row] for row in (0, *path)]
