"""Sources that look tokens up instead of running a model.

Dimension legend: R requests that get a tree, C candidates per request, S request slots.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.drafting.source import DraftStep, DrawsByNode, Proposal
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.predictor import FEATURES, Predictor, node_features
from vllm_specinfer.tree.candidates import Candidates
from vllm_specinfer.tree.proposals import certain, joined
from vllm_specinfer.tree.token_tree import ROOT

if TYPE_CHECKING:
    from vllm_specinfer.drafting.device_ngram import DeviceNgrams
    from vllm_specinfer.drafting.device_suffix import DeviceSuffixes
    from vllm_specinfer.drafting.text_copies import TextCopies

# One proposed node: parent (`ROOT` or an earlier node), token, chance that it is
# accepted where its parent is.
LookupNode = tuple[int, int, float]
NO_TOKENS = np.zeros(0, np.int32)


def chance_after(length: int) -> float:
    """How often what followed a match of so many tokens follows again.

    On 76,140 positions of held-out chats of SmolLM2-135M: 0.54, 0.65, 0.73, 0.77, 0.82
    and 0.81 for matches of 2 to 7 tokens within one text, 0.94 beyond.
    """
    return 1 - 1 / max(length, 2)


class Lookup(Protocol):
    """Knows texts; what keeps nothing between steps inherits the first four methods,
    which do nothing."""

    def start(self, slot: int) -> None:
        """A request starts in a slot."""

    def end(self, slot: int, tokens: np.ndarray) -> None:
        """A request leaves its slot, and these tokens [n] int32 to others."""

    def forget(self) -> None:
        """Forget all texts."""

    def read(self, slot: int, tokens: np.ndarray) -> Any:
        """A request has these tokens [n] int32; `find` need not be asked."""

    def find(
        self, slot: int, tokens: np.ndarray, alone: bool = False
    ) -> Sequence[LookupNode]:
        """What may follow a request's tokens [n] int32; parents before children.

        Args:
            slot: The request's.
            tokens: Its text.
            alone: No other text is asked.
        """

    def for_device(self, copies: "TextCopies") -> "DeviceSuffixes | DeviceNgrams":
        """The same for texts that the host does not know."""


class LookupSource:
    """A lookup as a source: its proposals are certain, so q is all on one token."""

    def __init__(self, lookup: Lookup, vocab_size: int | None = None) -> None:
        """Correct nothing yet.

        Args:
            lookup: What finds nodes.
            vocab_size: Of the target where texts may hold other tokens, placeholders
                of images, which are no nodes.
        """
        self._lookup, self._vocab_size = lookup, vocab_size
        # Slots of requests whose texts are found by nobody else, and of those that
        # find nobody else's.
        self._private: set[int] = set()
        self._alone: set[int] = set()
        self.calibration = Calibration()
        self.predictor: Predictor | None = None
        self.on_device: DeviceSuffixes | DeviceNgrams | None = None

    def capture(self, copies: "TextCopies") -> None:
        """Look up on the device, too."""
        self.on_device = self._lookup.for_device(copies)
        if self._vocab_size is not None:
            self.on_device.vocab_size = self._vocab_size

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; its text is left to others, and theirs to it,
        where the scheduler does not say otherwise (`SpecInferScheduler.schedule`)."""
        if slot in self._private:
            self._private.remove(slot)
            self._lookup.end(slot, NO_TOKENS)
        if getattr(request, "is_private", False):
            self._private.add(slot)
        self._alone.discard(slot)
        if getattr(request, "looks_up_itself", False):
            self._alone.add(slot)
        self._lookup.start(slot)
        if self.on_device is not None:
            self.on_device.start(slot)

    def end(self, slot: int, tokens: np.ndarray | None) -> None:
        """A request leaves its slot, and these tokens [n] int32 to others.

        None for all that the device knows, of which the host will hear later.
        """
        if slot in self._private:
            tokens = NO_TOKENS
        if tokens is not None:
            self._lookup.end(slot, tokens)
        elif self.on_device is not None:
            self.on_device.end(slot)

    def forget(self) -> None:
        """Forget all texts."""
        self._lookup.forget()
        if self.on_device is not None:
            self.on_device.forget()

    def has_read(self, slot: int, tokens: np.ndarray) -> None:
        """The device has looked up what may follow a request's tokens [n] int32."""
        self._lookup.read(slot, tokens)

    def propose(self, step: DraftStep) -> Proposal:
        """Look up what may follow the R requests, whatever is left out later."""
        found = []
        for i in step.growing.tolist():
            slot = int(step.slots[i])
            tokens = step.all_token_ids[slot, : step.num_tokens[i]]
            nodes = self._lookup.find(slot, tokens, slot in self._alone)
            found.append(self._known(nodes))
        candidates = Candidates.empty(len(found), max(map(len, found), default=0))
        draws: DrawsByNode = [{} for _ in found]
        features = None
        if self.predictor is not None:
            features = np.zeros((*candidates.tokens.shape, len(FEATURES)))
        for r, nodes in enumerate(found):
            if not nodes:
                continue
            n = len(nodes)
            parents, tokens, chances = zip(*nodes, strict=True)
            candidates.parents[r, :n], candidates.tokens[r, :n] = parents, tokens
            own = np.log(chances)
            if features is None:
                own = self.calibration.corrected(own)
            else:
                features[r, :n] = self._features(step, r, parents, own)
                own = self.predictor.corrected(features[r, :n])
            scores = candidates.scores[r]
            for node, parent in enumerate(parents):
                above = scores[parent] if parent != ROOT else 0.0
                scores[node] = above + own[node]
            if step.tests_draws and step.roots.temperatures[r]:
                draws[r] = {
                    node: joined([certain(t) for p, t, _ in nodes if p == node])
                    for node in set(parents)
                }
        return Proposal(candidates, draws, features)

    def _known(self, nodes: Sequence[LookupNode]) -> Sequence[LookupNode]:
        """Without tokens beyond the vocabulary and what is below them."""
        if self._vocab_size is None:
            return nodes
        places, known = {ROOT: ROOT}, []
        for node, (parent, token, chance) in enumerate(nodes):
            if parent in places and token < self._vocab_size:
                places[node] = len(known)
                known.append((places[parent], token, chance))
        return known

    def _features(
        self, step: DraftStep, r: int, parents: Sequence[int], own: np.ndarray
    ) -> np.ndarray:
        """[n, X] of a request's nodes, given their parents and own chances [n]."""
        above, depths, ranks = (np.zeros(len(own)) for _ in range(3))
        for node, parent in enumerate(parents):
            ranks[node] = parents[:node].count(parent)
            depths[node] = 1
            if parent != ROOT:
                above[node] = above[parent] + own[parent]
                depths[node] = depths[parent] + 1
        slot = int(step.slots[step.growing[r]])
        return node_features(
            own,
            above,
            ranks,
            depths,
            step.roots.temperatures[r],
            self.predictor.guesses.recent([slot]),
        )
