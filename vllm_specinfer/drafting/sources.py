"""All sources of an engine: whom to ask, and one tree from all answers.

Dimension legend: R requests that get a tree, N nodes of a tree, Q sources asked, C
candidates per request.
"""

import time
from collections.abc import Sequence

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.drafting.lookup import LookupSource, Ngrams
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.source import DraftStep, Proposal, Source
from vllm_specinfer.drafting.suffix import Suffixes
from vllm_specinfer.options import BestFirstTree, NgramSource, SuffixSource, Tree
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.tree.candidates import Candidates, FinishedTrees, merge
from vllm_specinfer.tree.proposals import Draws
from vllm_specinfer.tree.token_tree import ROOT

# An SSM costs its passes even where all its nodes are left out. Beyond this chance of
# the N-th lookup node, what it could add is less than that.
SURE = 0.4


def lookup_source(
    source: NgramSource | SuffixSource, max_num_reqs: int, max_depth: int
) -> LookupSource:
    """The source of a configuration entry."""
    if isinstance(source, NgramSource):
        return LookupSource(Ngrams(source, max_depth))
    return LookupSource(Suffixes(source, max_num_reqs, max_depth))


class SourceSet:
    """Lookups cost next to nothing and go first; SSMs add what they cannot know."""

    def __init__(
        self,
        lookups: Sequence[LookupSource],
        ssms: Sequence[NeuralSource],
        tree: Tree,
        num_nodes: int,
        budget: Budget | None = None,
    ) -> None:
        """Bring sources together.

        Args:
            lookups: Asked in every step.
            ssms: Asked where that pays.
            tree: The shape of the merged trees.
            num_nodes: Most nodes of one (N).
            budget: Decides what a step spends; None always spends all.
        """
        self.lookups, self.ssms = lookups, ssms
        self._num_nodes = num_nodes
        best_first = isinstance(tree, BestFirstTree) and tree.min_probability
        self._least = np.log(tree.min_probability) if best_first else -np.inf
        self._budget = budget
        self._asks, self._asked = True, False
        self._calibrations = [Calibration() for _ in self.all()]
        # By slot: [Q, N] the chances each source gave to the nodes of its tree.
        self._given: dict[int, np.ndarray] = {}

    def all(self) -> list[Source]:
        """Every source, in the order of their tests."""
        return [*self.lookups, *self.ssms]

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self._given.pop(slot, None)
        for source in self.all():
            source.start(slot, request)

    def propose(
        self, step: DraftStep
    ) -> tuple[FinishedTrees, list[dict[int, list[Draws]]]]:
        """The trees of R requests.

        Returns:
            The trees, and per request the draws below each node, `ROOT` included, one
            item per source.
        """
        least = np.full(len(step.growing), self._least)
        proposals = [self._ask(i, step, least) for i in range(len(self.lookups))]
        if proposals:
            known, _ = merge([p.candidates for p in proposals])
            least = np.maximum(least, known.nth_score(self._num_nodes))
        plain = bool(len(least)) and self._budget is not None
        plain = plain and self._budget.goes_plain()
        asked_before, asks = self._asked, not plain and self._asks_ssms(least)
        self._asked = asks
        if asks:
            started = time.perf_counter()
            numbers = range(len(self.lookups), len(self._calibrations))
            proposals += [self._ask(i, step, least) for i in numbers]
            # Only where the SSMs had nothing else to catch up with.
            if self._budget is not None and step.decodes_only and asked_before:
                spent = time.perf_counter() - started
                self._budget.observe_draft(len(step.growing), spent)
        if not proposals:
            proposals = [Proposal(Candidates.empty(len(least)), [{} for _ in least])]
        union, columns = merge([p.candidates for p in proposals])
        kept = self._least
        if plain:
            kept = np.inf
        elif self._budget is not None and len(least):
            kept = max(kept, self._budget.least_score(union.scores, asks))
        trees = union.best(self._num_nodes, kept)
        if self._budget is not None:
            self._remember(step, proposals, columns, trees)
        return trees, self._draws(proposals, columns, trees)

    def observe(self, slot: int, accepted: list[int]) -> None:
        """Of the slot's last tree these nodes were accepted."""
        given = self._given.pop(slot, None)
        if given is not None:
            for calibration, chances in zip(self._calibrations, given, strict=False):
                hits = np.count_nonzero(chances[accepted])
                calibration.observe(float(chances.sum()), hits)

    def _asks_ssms(self, least: np.ndarray) -> bool:
        """Whether the SSMs take part in this step."""
        if not self.ssms:
            return False
        if not len(least):  # prompts only: caught up with if drafting pays
            return self._asks
        if (least > np.log(SURE)).all():
            return False
        self._asks = self._budget is None or self._budget.drafts(len(least))
        return self._asks

    def _ask(self, number: int, step: DraftStep, least: np.ndarray) -> Proposal:
        """What a source proposes, with scores that can be believed."""
        source, calibration = self.all()[number], self._calibrations[number]
        if self._budget is None:
            return source.propose(step, least)
        proposal = source.propose(step, least - calibration.log_factor)
        return Proposal(calibration.applied(proposal.candidates), proposal.draws)

    def _remember(
        self,
        step: DraftStep,
        proposals: list[Proposal],
        columns: list[np.ndarray],
        trees: FinishedTrees,
    ) -> None:
        """Keep who gave which chance, to compare with what gets accepted."""
        given = np.zeros((len(step.growing), len(proposals), self._num_nodes))
        for q, (proposal, column) in enumerate(zip(proposals, columns, strict=True)):
            scores = proposal.candidates.scores
            rows, found = np.nonzero(np.isfinite(scores))
            places = trees.places[rows, column[rows, found]]
            rows, found, places = (
                x[places < self._num_nodes] for x in (rows, found, places)
            )
            # What the source said, before it was corrected.
            raw = scores[rows, found] - self._calibrations[q].log_factor
            given[rows, q, places] = np.exp(raw)
        slots = step.slots[step.growing].tolist()
        self._given.update(zip(slots, given, strict=True))

    def _draws(
        self,
        proposals: list[Proposal],
        columns: list[np.ndarray],
        trees: FinishedTrees,
    ) -> list[dict[int, list[Draws]]]:
        """Per request the draws below each kept node, one item per source."""
        draws: list[dict[int, list[Draws]]] = [{} for _ in trees.tokens]
        for proposal, column in zip(proposals, columns, strict=True):
            for r, of_request in enumerate(proposal.draws):
                for node, drawn in of_request.items():
                    place = ROOT if node == ROOT else trees.places[r, column[r, node]]
                    if place < self._num_nodes:
                        draws[r].setdefault(int(place), []).append(drawn)
        return draws
