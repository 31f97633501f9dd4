"""The walk down one tree (SpecInfer, arXiv 2305.09781, algorithm 2)."""

import numpy as np

from vllm_specinfer.tree.token_tree import ROOT


class TreeWalk:
    """Where one request stands in its tree.

    Attributes:
        path: Accepted rows from the root's child down; row i + 1 is node i.
    """

    def __init__(self, tokens: np.ndarray, parents: np.ndarray) -> None:
        """Stand at the root.

        Args:
            tokens: [n] token of each scheduled node.
            parents: [n] parent of each node, `ROOT` or an earlier node.
        """
        self.path: list[int] = []
        # Of equal children the first counts.
        pairs = zip(parents.tolist(), tokens.tolist(), strict=True)
        self._children = {pair: node for node, pair in reversed(list(enumerate(pairs)))}

    @property
    def node(self) -> int:
        """The node it stands at."""
        return self.path[-1] - 1 if self.path else ROOT

    def advance(self, token: int) -> bool:
        """Move to the child that holds the target's token; False where none does."""
        node = self._children.get((self.node, token))
        if node is None:
            return False
        self.path.append(node + 1)
        return True
