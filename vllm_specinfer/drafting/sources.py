"""All sources of an engine: whom to ask, and one tree from all answers.

Dimension legend: R requests that get a tree, N nodes of a tree, Q sources asked, C
candidates per request.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.drafting.experience import Experience, first_source
from vllm_specinfer.drafting.lookup import LookupSource
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.ngram import Ngrams
from vllm_specinfer.drafting.source import DraftStep, Proposal, Source
from vllm_specinfer.drafting.steps import TreeSteps
from vllm_specinfer.drafting.suffix import Suffixes
from vllm_specinfer.options import NgramSource, SuffixSource, Tree
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.step_stats import (
    BUDGET,
    MEASURING,
    NO_CANDIDATES,
    SCHEDULE,
)
from vllm_specinfer.tree.candidates import NO_TOKEN, FinishedTrees
from vllm_specinfer.tree.proposals import Draws
from vllm_specinfer.tree.token_tree import ROOT

# An SSM costs its passes even where all its nodes are left out. Beyond this chance of
# the N-th lookup node, what it could add is less than that.
LOG_SURE = math.log(0.4)


def lookup_source(
    source: NgramSource | SuffixSource,
    max_num_reqs: int,
    num_nodes: int,
    vocab_size: int | None = None,
) -> LookupSource:
    """The source of a configuration entry; `vocab_size` as of `LookupSource`."""
    if isinstance(source, NgramSource):
        return LookupSource(Ngrams(source, num_nodes), vocab_size)
    return LookupSource(Suffixes(source, max_num_reqs, num_nodes), vocab_size)


class Drafts(NamedTuple):
    """The trees of R requests.

    Attributes:
        trees: The trees.
        draws: [R] the draws below each node, `ROOT` included, one item per source.
        counts: [Q] nodes by source; what several propose is the first one's.
        reasons: By request why it has no node, of those that have none.
        work: Rows that the SSMs ran, and their passes over levels; None where they were
            not asked.
    """

    trees: FinishedTrees
    draws: list[dict[int, list[Draws]]]
    counts: list[int]
    reasons: dict[int, str]
    work: tuple[int, int] | None = None


class Decision(NamedTuple):
    """What is done about trees in a step.

    Attributes:
        grows: There may be some.
        asks: The SSMs are asked.
    """

    grows: bool
    asks: bool


class SourceSet:
    """Lookups cost next to nothing and go first; SSMs add what they cannot know.

    Attributes:
        reading: It has been decided to ask SSMs that have to read before.
    """

    def __init__(
        self,
        lookups: Sequence[LookupSource],
        ssms: Sequence[NeuralSource],
        tree: Tree,
        num_nodes: int,
        budget: Budget,
        steps: TreeSteps | None = None,
    ) -> None:
        """Bring sources together.

        Args:
            lookups: Asked in every step that is to have nodes.
            ssms: Asked where that pays.
            tree: The shape of the trees of lookups alone.
            num_nodes: Most nodes of one (N).
            budget: Decides what a step spends.
            steps: Merges trees; their definitions by default.
        """
        self.steps = steps or TreeSteps()
        self.lookups, self.ssms = lookups, ssms
        self._num_nodes = num_nodes
        # The lowest score of a node: what an SSM would not drop is kept.
        self.least = min((ssm.least for ssm in ssms), default=tree.least_score)
        self._budget = budget
        self.reading = False
        self.experience = Experience(self.all(), budget)

    @property
    def max_depth(self) -> int:
        """No tree is deeper; a lookup's are chains where a text repeats itself."""
        if self.lookups:
            return self._num_nodes
        return max(source.tree.max_depth for source in self.ssms)

    def words_of_layers(self) -> dict[str, int]:
        """64-bit words of what a row sees of its pass, by attention layer of an SSM."""
        return {
            name: source.num_words(1 + self.max_depth)
            for source in self.ssms
            for name in source.ssm.layer_names
        }

    def all(self) -> list[Source]:
        """Every source, in the order of their tests."""
        return [*self.lookups, *self.ssms]

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self.experience.start(slot)
        for source in self.all():
            source.start(slot, request)

    def end(self, slot: int, tokens: np.ndarray | None) -> None:
        """As `LookupSource.end`."""
        for lookup in self.lookups:
            lookup.end(slot, tokens)

    def forget(self) -> None:
        """Forget all texts."""
        for lookup in self.lookups:
            lookup.forget()

    @contextmanager
    def unlearned(self) -> Iterator[None]:
        """What is learned in here, of requests that are made up, is forgotten."""
        try:
            with self.experience.unlearned():
                yield
        finally:
            self.forget()
            for source in self.ssms:
                if source.on_device is not None:
                    source.on_device.levels.forget()

    def drop_graphs(self) -> None:
        """Forget what was captured: it was over another KV cache."""
        for source in self.all():
            source.on_device = None
        for source in self.ssms:
            source.ssm.drop_graphs()

    def lose_kv(self) -> None:
        """The KV cache has lost what was in it."""
        for source in self.ssms:
            source.ssm.kv.forget()

    def propose(
        self,
        step: DraftStep,
        most: int | None = None,
        decided: Decision | None = None,
    ) -> Drafts:
        """The trees of R requests.

        Args:
            step: What they know.
            most: Nodes of a tree in this step, fewer than N; None for N.
            decided: What has been decided; None for nothing.
        """
        num_reqs = len(step.growing)
        most = self._num_nodes if most is None else most
        least = np.full(num_reqs, -np.inf)
        proposals, asks, scores, sure, work = [], False, None, False, None
        if decided is None:
            grows = most > 0 and self._budget.grows(num_reqs)
        else:
            grows = decided.grows
        if grows:
            proposals = [source.propose(step) for source in self.lookups]
            if proposals:
                known, _ = self.steps.merge([p.candidates for p in proposals])
                least = known.nth_score(self._num_nodes).astype(float)
                # Where draws are tested, it is not up to the requests beside one's own
                # whether there are any.
                tested = step.tests_draws and step.roots.sampled
                sure = num_reqs > 0 and not tested and bool((least > LOG_SURE).all())
                scores = known.scores
            if decided is None:
                asks = not sure and self._asks_ssms(step, scores, most)
            else:
                asks = decided.asks
            if not self._is_read(step):
                asks = self.reading = False
            asks = asks and not self._reads_first(step)
            if asks:
                asked, work = self._ask_ssms(step, least, most)
                proposals += asked
        if not asks:
            for source in self.ssms:
                source.ssm.skip(step)
            if not any(np.isfinite(p.candidates.scores).any() for p in proposals):
                trees = FinishedTrees.none(num_reqs, self._num_nodes)
                reason = self._reason(False, most, grows, asks)
                reasons = dict.fromkeys(range(num_reqs), reason)
                return Drafts(trees, [{} for _ in least], [], reasons)
        union, columns = self.steps.merge([p.candidates for p in proposals])
        worth = self._budget.least_score(union.scores, asks, most)
        kept = max(self.least, worth)
        if step.tests_draws:
            # What has no node is not tested, which must not depend on the draws.
            union = union.raised(step.roots.temperatures > 0, kept)
        trees = self.steps.best(union, self._num_nodes, kept, most)
        given, seen = self._given_by_source(proposals, columns, trees)
        for r, slot in enumerate(step.slots[step.growing].tolist()):
            features = [None if of_all is None else of_all[r] for of_all in seen]
            self.experience.note_tree(slot, trees.parents[r], given[r], features)
        return Drafts(
            trees,
            self._draws(proposals, columns, trees),
            np.bincount(first_source(given)[trees.tokens != NO_TOKEN]).tolist(),
            self._reasons(trees, union.scores, most, grows, asks),
            work,
        )

    def _asks_ssms(self, step: DraftStep, known: np.ndarray | None, most: int) -> bool:
        """Whether the SSMs take part in this step, given the lookups' scores [R, C]."""
        if not self.ssms:
            return False
        if self.reading:
            return True
        kv_of_ssms = [source.ssm.kv for source in self.ssms]
        unread = sum(kv.num_unread(step.slots, step.num_tokens) for kv in kv_of_ssms)
        return self._budget.drafts(len(step.growing), unread, known, most)

    def _is_read(self, step: DraftStep) -> bool:
        """Whether somebody needs what the SSMs would read in this step.

        Where all have ended, it is for whoever goes on with their texts: SSMs read it
        again, heads cannot, as nobody keeps the target's states.
        """
        return not step.ended or any(source.ssm.reads_states for source in self.ssms)

    def _reads_first(self, step: DraftStep) -> bool:
        """Whether SSMs that have sat out for long only read in this step.

        All of it at once would keep every request waiting; vLLM, too, reads prompts in
        pieces.
        """
        behind = [source.ssm for source in self.ssms if source.ssm.is_far_behind(step)]
        for ssm in behind:
            ssm.read_some(step)
        self.reading = bool(behind)
        return self.reading

    def _ask_ssms(
        self, step: DraftStep, least: np.ndarray, most: int
    ) -> tuple[list[Proposal], tuple[int, int]]:
        """What they propose, and `Drafts.work`."""
        rows, levels = ssm_work(self.ssms)
        begun = [
            source.begin(step, np.maximum(least, source.least), most)
            for source in self.ssms
        ]
        proposals = [wait() for wait in begun]
        all_rows, all_levels = ssm_work(self.ssms)
        return proposals, (all_rows - rows, all_levels - levels)

    def _given_by_source(
        self,
        proposals: list[Proposal],
        columns: list[np.ndarray],
        trees: FinishedTrees,
    ) -> tuple[np.ndarray, list[np.ndarray | None]]:
        """What each source gave each node.

        Returns:
            [R, Q, N] scores, -inf where it gave none; per source [R, N, X] what its
            predictor saw, None without one.
        """
        num_reqs, size = len(trees.tokens), self._num_nodes + 1
        rows, seen = np.arange(num_reqs)[:, None], []
        # The last column is that of candidates that became no node.
        given = np.full((num_reqs, len(proposals), size), -np.inf)
        for q, (proposal, column) in enumerate(zip(proposals, columns, strict=True)):
            places, features = trees.places[rows, column], proposal.features
            given[rows, q, places] = proposal.candidates.scores
            if features is not None:
                of_nodes = np.zeros((num_reqs, size, features.shape[2]))
                of_nodes[rows, places] = features
                features = of_nodes[:, :-1]
            seen.append(features)
        return given[:, :, :-1], seen

    def _reasons(
        self,
        trees: FinishedTrees,
        scores: np.ndarray,
        most: int,
        grows: bool,
        asks: bool,
    ) -> dict[int, str]:
        """Why requests have no node, given all candidates' scores [R, C]."""
        empty = [r for r, size in enumerate(trees.sizes) if not size]
        if not empty:
            return {}
        candidates = (np.isfinite(scores) & (scores >= self.least)).any(axis=1)
        return {r: self._reason(candidates[r], most, grows, asks) for r in empty}

    def _reason(self, candidates: bool, most: int, grows: bool, asks: bool) -> str:
        """Why a request has no node; whether it had likely candidates."""
        if not most:
            return SCHEDULE
        if not grows:
            return MEASURING
        if candidates or (self.ssms and not asks):
            return BUDGET
        return NO_CANDIDATES

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


def ssm_work(ssms: Sequence[NeuralSource]) -> tuple[int, int]:
    """Rows of these SSMs so far, and their passes over levels."""
    rows, levels = zip(*(source.work for source in ssms), strict=True)
    return sum(rows), sum(levels)
