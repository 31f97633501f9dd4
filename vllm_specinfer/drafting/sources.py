"""All sources of an engine: whom to ask, and one tree from all answers.

Dimension legend: R requests that get a tree, N nodes of a tree.
"""

import numpy as np

from vllm_specinfer.drafting.lookup import LookupSource, Ngrams
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.source import DraftStep, Proposal, Source
from vllm_specinfer.drafting.suffix import Suffixes
from vllm_specinfer.options import BestFirstTree, NgramSource, SuffixSource, Tree
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

    def __init__(self, tree: Tree) -> None:
        """`tree` is the shape of the merged trees."""
        self.lookups: list[LookupSource] = []
        self.ssms: list[NeuralSource] = []
        best_first = isinstance(tree, BestFirstTree) and tree.min_probability
        self._least = np.log(tree.min_probability) if best_first else -np.inf

    def all(self) -> list[Source]:
        """Every source, in the order of their tests."""
        return [*self.lookups, *self.ssms]

    def propose(
        self, step: DraftStep, num_nodes: int
    ) -> tuple[FinishedTrees, list[dict[int, list[Draws]]]]:
        """The trees of R requests.

        Returns:
            The trees, and per request the draws below each node, `ROOT` included, one
            item per source.
        """
        least = np.full(len(step.growing), self._least)
        proposals = [source.propose(step, least) for source in self.lookups]
        if proposals:
            known, _ = merge([p.candidates for p in proposals])
            least = np.maximum(least, known.nth_score(num_nodes))
        if not (least > np.log(SURE)).all() or not len(least):
            proposals += [source.propose(step, least) for source in self.ssms]
        if not proposals:
            proposals = [Proposal(Candidates.empty(len(least)), [{} for _ in least])]
        union, columns = merge([p.candidates for p in proposals])
        trees = union.best(num_nodes, self._least)
        draws: list[dict[int, list[Draws]]] = [{} for _ in least]
        for proposal, column in zip(proposals, columns, strict=True):
            for r, of_request in enumerate(proposal.draws):
                for node, drawn in of_request.items():
                    place = ROOT if node == ROOT else trees.places[r, column[r, node]]
                    if place < num_nodes:
                        draws[r].setdefault(int(place), []).append(drawn)
        return trees, draws
