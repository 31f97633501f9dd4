"""All sources of an engine: whom to ask, and one tree from all answers.

Dimension legend: R requests that get a tree, N nodes of a tree.
"""

import time

import numpy as np

from vllm_specinfer.drafting.lookup import LookupSource, Ngrams
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.source import DraftStep, Proposal, Source
from vllm_specinfer.drafting.suffix import Suffixes
from vllm_specinfer.options import BestFirstTree, NgramSource, SuffixSource, Tree
from vllm_specinfer.scheduling.budget import Budget
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

    def __init__(self, tree: Tree, budget: Budget | None = None) -> None:
        """Start without sources.

        Args:
            tree: The shape of the merged trees.
            budget: Decides what a step spends; None always spends all.
        """
        self.lookups: list[LookupSource] = []
        self.ssms: list[NeuralSource] = []
        best_first = isinstance(tree, BestFirstTree) and tree.min_probability
        self._least = np.log(tree.min_probability) if best_first else -np.inf
        self._budget = budget
        self._asks = True

    def all(self) -> list[Source]:
        """Every source, in the order of their tests."""
        return [*self.lookups, *self.ssms]

    def propose(
        self, step: DraftStep, num_nodes: int
    ) -> tuple[FinishedTrees, list[dict[int, list[Draws]]], np.ndarray]:
        """The trees of R requests.

        Returns:
            The trees; per request the draws below each node, `ROOT` included, one item
            per source; and [R] how many nodes the sources expect to be accepted.
        """
        least = np.full(len(step.growing), self._least)
        proposals = [source.propose(step, least) for source in self.lookups]
        if proposals:
            known, _ = merge([p.candidates for p in proposals])
            least = np.maximum(least, known.nth_score(num_nodes))
        asked = self._asks_ssms(least)
        if asked:
            started = time.perf_counter()
            proposals += [source.propose(step, least) for source in self.ssms]
            if self._budget is not None and step.decodes_only:
                spent = time.perf_counter() - started
                self._budget.observe_draft(len(step.growing), spent)
        if not proposals:
            proposals = [Proposal(Candidates.empty(len(least)), [{} for _ in least])]
        union, columns = merge([p.candidates for p in proposals])
        kept = self._least
        if self._budget is not None and len(least):
            kept = max(kept, self._budget.least_score(union.scores, asked))
        trees = union.best(num_nodes, kept)
        chances = np.exp(-np.sort(-union.scores, axis=1)[:, :num_nodes])
        expected = np.where(chances >= np.exp(kept), chances, 0).sum(axis=1)
        draws: list[dict[int, list[Draws]]] = [{} for _ in least]
        for proposal, column in zip(proposals, columns, strict=True):
            for r, of_request in enumerate(proposal.draws):
                for node, drawn in of_request.items():
                    place = ROOT if node == ROOT else trees.places[r, column[r, node]]
                    if place < num_nodes:
                        draws[r].setdefault(int(place), []).append(drawn)
        return trees, draws, expected

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
