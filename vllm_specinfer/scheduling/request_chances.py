"""What the trees of each request were lately, where nobody sees them in time."""

import numpy as np

# A new tree's weight. On traces of chats the average of the last few trees foretells
# half of how the next ones' chances differ between requests.
WEIGHT = 1 / 3
# Less is none: who asks what each node is worth need not ask of thousands of these.
LEAST = 1e-3


class RequestChances:
    """Running averages by slot.

    Dimension legend: S request slots, R requests, N nodes per request.
    """

    def __init__(self, num_slots: int, num_nodes: int) -> None:
        """Nothing is known yet.

        Args:
            num_slots: S.
            num_nodes: N.
        """
        self._chances = np.full((num_slots, num_nodes), np.nan)

    def start(self, slot: int) -> None:
        """Another request starts in a slot."""
        self._chances[slot] = np.nan

    def of(self, slots: np.ndarray) -> np.ndarray:
        """[R, N] chances of these requests' best, second best, ... node.

        NaN where nothing is known yet.
        """
        return self._chances[slots]

    def observe(self, slots: np.ndarray, scores: np.ndarray) -> None:
        """Take in a tree of each.

        Args:
            slots: [R].
            scores: [R, N] log of the chances, best first; -inf where there is no node.
        """
        chances, known = np.exp(scores), self._chances[slots]
        averages = known + WEIGHT * (chances - known)
        averages[averages < LEAST] = 0.0
        self._chances[slots] = np.where(np.isnan(known), chances, averages)
