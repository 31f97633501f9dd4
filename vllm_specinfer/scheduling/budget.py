"""How many nodes a step is worth, as sources and steps ask it; without limit, here.

Dimension legend: R requests of a step, C candidates per request, N nodes per request.
"""

import math
from typing import Any, NamedTuple

import numpy as np


class Worth(NamedTuple):
    """What it brings to expand nodes, in tokens, and what it costs.

    Attributes:
        child: What a sure node's best child brings.
        row: What running a node costs.
        level: What the pass over a level costs besides.
        least: The chance below which no node, and so no child of it, is worth a row of
            the target.
    """

    child: float = 1.0
    row: float = 0.0
    level: float = 0.0
    least: float = 0.0

    def gain(self, score: float) -> float:
        """What expanding a node brings beyond its costs, by its log chance."""
        above = math.exp(score) - self.least
        return above / (1 - self.least) * self.child - self.row

    def expands(self, scores: np.ndarray) -> np.ndarray:
        """[F] nodes of a level that bring more than they cost, by their log chances.

        None where together they do not bring more than their pass.
        """
        gained = [self.gain(score) for score in scores.tolist()]
        pays = sum(gain for gain in gained if gain > 0) > self.level
        return np.array([pays and gain > 0 for gain in gained], bool)

    def pays(self, chances: float, rows: int) -> bool:
        """Whether a level of nodes with these chances in all, so many rows, pays.

        As if each of them were sure or out of the question.
        """
        return chances * self.child > rows * self.row + self.level


class Budget:
    """Spends all that the trees have room for, in every step."""

    # Chances are compared with what gets accepted.
    learns = False

    def grows(self, num_reqs: int) -> bool:
        """Whether this step's R trees may have nodes; asked once per step."""
        return True

    def drafts(
        self,
        num_reqs: int,
        unread: int = 0,
        known: np.ndarray | None = None,
        most: int | None = None,
    ) -> bool:
        """Whether asking the SSMs for R requests pays.

        Args:
            num_reqs: R, none while in prompts.
            unread: Tokens that the SSMs have not read yet, of all requests and SSMs.
            known: [R, C] log of the chances of candidates that need no SSM.
            most: Nodes of a tree in this step; None for N.
        """
        return True

    def worth(self) -> Worth:
        """Of expanding nodes, in this step; nothing costs anything."""
        return Worth()

    def nodes(self, chances: np.ndarray, most: int, asks: bool = True) -> np.ndarray:
        """[R] how many nodes each of R trees gets that nobody has seen yet.

        Args:
            chances: [R, N] what is expected of the requests' nodes, best first; NaN
                where nothing is.
            most: No more than these.
            asks: The SSMs are asked; otherwise all nodes are lookups'.
        """
        return np.full(len(chances), most)

    def observe_chances(
        self, scores: np.ndarray, num_nodes: np.ndarray, asks: bool = True
    ) -> None:
        """What such trees turned out to be.

        Args:
            scores: [R, N] log of the chances, best first; -inf where there is no node.
            num_nodes: [R] so many of them had rows.
            asks: As in `nodes`.
        """

    def observe_known(self, scores: np.ndarray) -> None:
        """What trees of lookups alone are, or would have been; [R, N] as above."""

    def least_score(
        self, scores: np.ndarray, drafted: bool, most: int | None = None
    ) -> float:
        """The score below which nodes cost more than they bring.

        Args:
            scores: [R, C] log of the chances; -inf where there is no candidate.
            drafted: The SSMs were asked.
            most: Nodes of a tree in this step; None for N.
        """
        return -np.inf

    def observe_step(self, rows: int, seconds: float, trees: bool) -> None:
        """A target step without a prompt took so long, all but its drafting."""

    def observe_draft(
        self,
        num_reqs: int,
        rows: int,
        levels: int,
        seconds: float,
        follows: bool = False,
    ) -> None:
        """A draft of R requests took so long, for so many rows and levels of SSMs.

        Args:
            num_reqs: R.
            rows: Rows.
            levels: Passes over levels.
            seconds: What it took, with the host's own work where that waits.
            follows: None of the rows is a prompt's, as many as they are.
        """

    def observe_prompts(self, num_reqs: int, seconds: float) -> None:
        """Beside a draft of R requests the SSMs have read prompts for so long."""

    def learned(self) -> dict[str, Any]:
        """What `recall` takes, as JSON has it."""
        return {}

    def recall(self, learned: dict[str, Any]) -> None:
        """Start from what another engine has learned; raises ValueError, KeyError."""
