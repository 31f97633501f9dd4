"""What stochastic verification remembers of the draws behind a tree.

Dimension legend: F rows, M candidates the draws were made from, K draws per row.
"""

from dataclasses import dataclass

import numpy as np

NO_DRAW = -1


@dataclass(frozen=True)
class Draws:
    """Draws of F nodes' children, each with the distribution it was made from.

    All draws count, whether or not their node is in the verified tree: leaving out
    those that look hopeless would change the output's distribution.

    Attributes:
        places: [F, K] int64 drawn candidates in the order of drawing, `NO_DRAW` at the
            end of a row where there are fewer. Equal draws are kept.
        tokens: [F, M] int64 of the candidates, distinct within a row.
        q: [F, M] float64, sums to 1.
    """

    places: np.ndarray
    tokens: np.ndarray
    q: np.ndarray

    def row(self, f: int) -> "Draws":
        """One node's draws, F = 1."""
        return Draws(self.places[f : f + 1], self.tokens[f : f + 1], self.q[f : f + 1])


def stacked(draws: list[Draws]) -> Draws:
    """Nodes of different trees and levels together; M and K are padded.

    Raises:
        ValueError: The list is empty.
    """
    num_draws = max(d.places.shape[1] for d in draws)
    num_candidates = max(d.tokens.shape[1] for d in draws)

    def padded(values: np.ndarray, width: int, fill: int) -> np.ndarray:
        pad = width - values.shape[1]
        return np.pad(values, ((0, 0), (0, pad)), constant_values=fill)

    return Draws(
        np.vstack([padded(d.places, num_draws, NO_DRAW) for d in draws]),
        np.vstack([padded(d.tokens, num_candidates, 0) for d in draws]),
        np.vstack([padded(d.q, num_candidates, 0) for d in draws]),
    )
