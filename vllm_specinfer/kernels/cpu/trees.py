"""The steps of `drafting/steps.py` in C++.

Right after a pass over hundreds of megabytes of weights NumPy takes tens of
microseconds per call.
"""

from collections.abc import Sequence

import numpy as np

from vllm_specinfer.drafting.growth import EVERYTHING, Frontier, TreeGrowth, level_words
from vllm_specinfer.drafting.steps import TreeSteps
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.options import BestFirstTree, Tree
from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.tree import candidates
from vllm_specinfer.tree.candidates import NO_TOKEN, Candidates, FinishedTrees


def compiled_steps() -> TreeSteps:
    """The compiled steps, or their definitions where nothing can be compiled."""
    kernels = extension.load()
    if kernels is None:
        return TreeSteps()
    return TreeSteps(kernels.coupled_children, CompiledGrowth, merge, best)


class CompiledGrowth(TreeGrowth):
    """`TreeGrowth`, but without features."""

    def __init__(
        self,
        tree: Tree,
        num_nodes: int,
        capacity: np.ndarray,
        max_depth: np.ndarray,
        least: np.ndarray,
        worth: Worth = EVERYTHING,
    ) -> None:
        """Start R empty trees; as `TreeGrowth`."""
        self._tree, self._num_nodes, self._depth = tree, num_nodes, 0
        self._best_first = isinstance(tree, BestFirstTree)
        self.features = None
        self._grown = extension.load().Growth(
            *(capacity, max_depth, least, self._best_first),
            *(tree.max_depth, self.num_children, num_nodes),
            *(level_words(tree, num_nodes), *worth),
        )

    def extend(
        self, logprobs: np.ndarray, tokens: np.ndarray, features: None = None
    ) -> Frontier | None:
        """Add the frontier's children and choose the next frontier."""
        self._depth += 1
        found = self._grown.extend(logprobs, tokens)
        return found and Frontier(*found)

    def finish(self) -> Candidates:
        """The N best of all that was proposed."""
        return Candidates(*self._grown.finish())


def merge(sources: Sequence[Candidates]) -> tuple[Candidates, list[np.ndarray]]:
    """As `tree.candidates.merge`."""
    if len(sources) == 1:
        return candidates.merge(sources)
    union, columns = extension.load().merge([_arrays(source) for source in sources])
    return Candidates(*union), columns


def best(
    of: Candidates, num_nodes: int, least: float = -np.inf, most: int | None = None
) -> FinishedTrees:
    """As `Candidates.best`."""
    most = num_nodes if most is None else most
    trees = extension.load().best(_arrays(of), num_nodes, least, most, NO_TOKEN)
    return FinishedTrees(*trees)


def _arrays(of: Candidates) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return of.tokens, of.parents, of.scores
