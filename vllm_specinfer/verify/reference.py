"""Tree verification on one page: what every faster verifier is tested against.

Each rule takes the target's distribution p at a node, after all sampling parameters,
and the node's proposals; it returns the emitted token and the child to go on from, or
None where the step ends. Randomness comes from `Chance`, so that tests can also go
through every outcome with its exact probability (tests/verify/test_reference.py).

Dimension legend: V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Chance(Protocol):
    """A source of random decisions."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""

    def choose(self, weights: torch.Tensor) -> int:
        """An index, drawn in proportion to the weights."""


@dataclass(frozen=True)
class Proposal:
    """One child and the distribution it was drawn from.

    Attributes:
        token: What it proposes.
        child: The node that holds the token; proposals may share it.
        q: [V] the distribution this very draw was made from.
    """

    token: int
    child: int
    q: torch.Tensor


Rule = Callable[[torch.Tensor, Sequence[Proposal], Chance], tuple[int, int | None]]


def greedy(
    p: torch.Tensor, proposals: Sequence[Proposal], chance: Chance
) -> tuple[int, int | None]:
    """The argmax of p (algorithm 2, VerifyGreedy); ties go to the lowest token."""
    return _follow(int(p.argmax()), proposals)


def naive(
    p: torch.Tensor, proposals: Sequence[Proposal], chance: Chance
) -> tuple[int, int | None]:
    """Draw from p, go on where a child holds the draw (section 4.3, NaiveSampling).

    The coupled rule of the engine is this one with noise that the drafts share.
    """
    return _follow(chance.choose(p), proposals)


def mss(
    p: torch.Tensor, proposals: Sequence[Proposal], chance: Chance
) -> tuple[int, int | None]:
    """Multi-step speculative sampling (algorithm 2, VerifyStochastic).

    Exact where the proposals are independent draws, each from its own q, and all of
    them are kept, equal tokens too.
    """
    left = list(proposals)
    while left:
        drawn = left.pop(chance.choose(torch.ones(len(left))))
        accepted, p = _test(p, drawn, chance)
        if accepted:
            return drawn.token, drawn.child
    return chance.choose(p), None


def rrsw(
    p: torch.Tensor, proposals: Sequence[Proposal], chance: Chance
) -> tuple[int, int | None]:
    """Recursive rejection of draws without replacement, in the order of drawing.

    Exact where each q is what was left for that draw: `without_replacement`.
    """
    for drawn in proposals:
        accepted, p = _test(p, drawn, chance)
        if accepted:
            return drawn.token, drawn.child
    return chance.choose(p), None


def without_replacement(q: torch.Tensor, tokens: Sequence[int]) -> list[torch.Tensor]:
    """The distribution each of these draws was made from, [V] each."""
    left = []
    for token in tokens:
        left.append(q)
        q = q.clone()
        q[token] = 0
        q = _normalised(q, q)
    return left


def verify(
    rule: Rule,
    target: Mapping[int | None, torch.Tensor],
    proposals: Mapping[int | None, Sequence[Proposal]],
    chance: Chance,
) -> list[int]:
    """One step: the tokens a tree gives.

    Args:
        rule: How one node is verified.
        target: [V] p of each node, None is the root.
        proposals: The proposals below each node; a leaf has none or is missing.
        chance: The randomness.

    Returns:
        Accepted tokens, then the bonus or correction token.
    """
    node: int | None = None
    emitted = []
    while True:
        token, child = rule(target[node], proposals.get(node, ()), chance)
        emitted.append(token)
        if child is None:
            return emitted
        node = child


def _follow(token: int, proposals: Sequence[Proposal]) -> tuple[int, int | None]:
    found = (s.child for s in proposals if s.token == token)
    return token, next(found, None)


def _test(
    p: torch.Tensor, drawn: Proposal, chance: Chance
) -> tuple[bool, torch.Tensor]:
    """Accept with min(1, p/q); p without what the proposal could have given."""
    ratio = p[drawn.token] / drawn.q[drawn.token]
    if chance.accept(min(1.0, float(ratio))):
        return True, p
    return False, _normalised((p - drawn.q).clamp(min=0), p)


def _normalised(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Sum 1; `otherwise` where rounding left nothing."""
    total = weights.sum()
    return weights / total if total > 0 else otherwise
