"""What drafting does between its passes; a CPU has compiled twins of all of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_specinfer.drafting.children import Coupled, coupled_children
from vllm_specinfer.drafting.growth import TreeGrowth
from vllm_specinfer.tree.candidates import Candidates, FinishedTrees, merge

Merge = Callable[[Sequence[Candidates]], tuple[Candidates, list[np.ndarray]]]


@dataclass
class TreeSteps:
    """From the likeliest tokens of rows to trees, step by step.

    Attributes:
        coupled: The children of sampled rows under the rule "coupled".
        grow: Starts the trees of one source.
        merge: The union of the sources' trees.
        best: The best nodes of it.
    """

    coupled: Coupled = coupled_children
    grow: Callable[..., TreeGrowth] = TreeGrowth
    merge: Merge = merge
    best: Callable[..., FinishedTrees] = Candidates.best
