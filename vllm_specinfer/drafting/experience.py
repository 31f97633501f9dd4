"""What sources learn of their trees: how far to believe the chances that they give.

Dimension legend: N nodes of a tree, Q sources that were asked, X features of a node.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from vllm_specinfer.drafting.source import Source
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.cost import finite
from vllm_specinfer.scheduling.predictor import Predictor
from vllm_specinfer.tree.token_tree import ROOT


class Experience:
    """Corrects the sources' chances by what became of their nodes.

    Attributes:
        sources: Whose chances; in the order of their tests.
    """

    def __init__(self, sources: Sequence[Source], budget: Budget) -> None:
        """Know nothing yet.

        Args:
            sources: Whose chances; in the order of their tests.
            budget: Learns, too, or keeps all others from it.
        """
        self.sources = sources
        self._budget = budget
        # By slot: [N] parents of its tree, [Q, N] scores each source gave its nodes,
        # and per source [N, X] what its predictor saw of them, None without one.
        self._given: dict[int, tuple[np.ndarray, np.ndarray, list]] = {}

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        self._given.pop(slot, None)
        for predictor in self._predictors():
            predictor.guesses.start(slot)

    def note_tree(
        self,
        slot: int,
        parents: np.ndarray,
        given: np.ndarray,
        features: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """A tree that is going to be verified.

        Args:
            slot: Its request's.
            parents: [N] of its nodes.
            given: [Q, N] scores that each source gave them.
            features: Per source [N, X] what its predictor saw of them, None without
                one; None where there are no predictors.
        """
        self._given[slot] = parents, given, features or [None] * len(given)

    def sources_of_nodes(self) -> Callable[[int, list[int]], list[int]]:
        """Gives the source of each of these nodes of a slot's last tree, as of now."""
        trees = dict(self._given)

        def sources_of(slot: int, nodes: list[int]) -> list[int]:
            return first_source(trees[slot][1][:, nodes]).tolist() if nodes else []

        return sources_of

    def forgive(self) -> None:
        """A step begins; see `Calibration.forgive`."""
        for source in self.sources:
            (source.predictor or source.calibration).forgive()

    def observe(self, slot: int, accepted: list[int], num_rows: int) -> None:
        """Of the nodes of the slot's last tree that had rows these were accepted."""
        if slot not in self._given:
            return
        parents, scores, features = self._given.pop(slot)
        if self._budget.learns:
            tested = parents[:num_rows]
            self._calibrate(slot, tested, scores, features, accepted)

    def _calibrate(
        self,
        slot: int,
        parents: np.ndarray,
        scores: np.ndarray,
        features: Sequence[np.ndarray | None],
        accepted: list[int],
    ) -> None:
        right = {ROOT, *accepted}
        # Of so few nodes NumPy takes several times as long.
        tested = [
            (node, parent)
            for node, parent in enumerate(parents.tolist())
            if parent in right
        ]
        for source, own, seen in zip(
            self.sources, scores.tolist(), features, strict=False
        ):
            proposed = [
                (node, parent) for node, parent in tested if own[node] > -math.inf
            ]
            if source.predictor is not None:
                nodes = [node for node, _ in proposed]
                hits = np.array([node in right for node in nodes], bool)
                source.predictor.observe(slot, seen[nodes], hits)
                continue
            expected = sum(
                math.exp(own[node] - (0.0 if parent == ROOT else own[parent]))
                for node, parent in proposed
            )
            hits = sum(node in right for node, _ in proposed)
            source.calibration.observe(expected, hits)

    def learned(self) -> dict[str, Any]:
        """What `recall` takes, as JSON has it."""
        distrust = [float(source.calibration.distrust) for source in self.sources]
        predictors = [predictor.learned() for predictor in self._predictors()]
        return {
            "budget": self._budget.learned(),
            "distrust": distrust,
            "predictors": predictors,
        }

    def recall(self, learned: dict[str, Any]) -> None:
        """Start from what another engine with these sources has learned.

        Raises:
            KeyError, TypeError, ValueError: This is not what `learned` returns.
        """
        distrust = finite(learned["distrust"], (len(self.sources),)).tolist()
        predictors = learned.get("predictors", [])
        for predictor, state in zip(self._predictors(), predictors, strict=True):
            predictor.recall(state)
        self._budget.recall(learned["budget"])
        for source, of_source in zip(self.sources, distrust, strict=True):
            source.calibration.recall(of_source)

    @contextmanager
    def unlearned(self) -> Iterator[None]:
        """What is learned in here is forgotten."""
        calibrations = [source.calibration for source in self.sources]
        learners = [vars(x) for x in (self._budget, *calibrations, *self._predictors())]
        before = copy.deepcopy(learners)
        try:
            yield
        finally:
            for learner, state in zip(learners, before, strict=True):
                learner.clear()
                learner.update(state)

    def _predictors(self) -> list[Predictor]:
        return [s.predictor for s in self.sources if s.predictor is not None]


def first_source(given: np.ndarray) -> np.ndarray:
    """[..., N] the first source of each node, by the scores [..., Q, N] they gave."""
    return np.isfinite(given).argmax(axis=-2)
