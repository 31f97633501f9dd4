"""What stochastic verification remembers of the draws behind a tree.

Dimension legend: F rows, M candidates the draws were made from, K draws per row.
"""

from dataclasses import dataclass

import numpy as np

NO_DRAW = -1
NO_CANDIDATE = -1


@dataclass(frozen=True)
class Draws:
    """Draws of F nodes' children, each with the distribution it was made from.

    All draws count, whether or not their node is in the verified tree: leaving out
    those that look hopeless would change the output's distribution. Equal draws are
    kept, whether one source made them or two.

    Attributes:
        places: [F, K] int64 drawn candidates in the order of their tests, `NO_DRAW` at
            the end of a row where there are fewer.
        tokens: [F, M] int64 of the candidates, distinct within a row; `NO_CANDIDATE` at
            the end of a row where there are fewer.
        q: [F, K, M] float64, what each draw was made from: sums to 1, or is 0 where
            there is no draw.
    """

    places: np.ndarray
    tokens: np.ndarray
    q: np.ndarray

    def row(self, f: int) -> "Draws":
        """One node's draws, F = 1."""
        return Draws(self.places[f : f + 1], self.tokens[f : f + 1], self.q[f : f + 1])


def certain(token: int) -> Draws:
    """The one draw of a source that proposes nothing but this token, F = 1."""
    return Draws(np.zeros((1, 1), np.int64), np.array([[token]]), np.ones((1, 1, 1)))


def joined(draws: list[Draws]) -> Draws:
    """The draws of several sources for one node, tested in this order, F = 1.

    Args:
        draws: [S] of F = 1 each, S >= 1.
    """
    if len(draws) == 1:
        return draws[0]
    tokens, columns = np.unique(
        np.concatenate([d.tokens[0] for d in draws]), return_inverse=True
    )
    columns = np.split(columns, np.cumsum([d.tokens.shape[1] for d in draws])[:-1])
    places, q = [], []
    for d, column in zip(draws, columns, strict=True):
        num_draws = int((d.places[0] != NO_DRAW).sum())
        places.append(column[d.places[0, :num_draws]])
        q.append(np.zeros((num_draws, len(tokens))))
        q[-1][:, column] = d.q[0, :num_draws]
    return Draws(np.concatenate(places)[None], tokens[None], np.concatenate(q)[None])


def stacked(draws: list[Draws]) -> Draws:
    """Nodes of different trees and levels together; M and K are padded.

    Raises:
        ValueError: The list is empty.
    """
    num_rows = sum(len(d.places) for d in draws)
    num_draws = max(d.places.shape[1] for d in draws)
    num_candidates = max(d.tokens.shape[1] for d in draws)
    places = np.full((num_rows, num_draws), NO_DRAW)
    tokens = np.full((num_rows, num_candidates), NO_CANDIDATE)
    q = np.zeros((num_rows, num_draws, num_candidates))
    start = 0
    for d in draws:
        (rows, k), m = d.places.shape, d.tokens.shape[1]
        end = start + rows
        places[start:end, :k], tokens[start:end, :m] = d.places, d.tokens
        q[start:end, :k, :m] = d.q
        start = end
    return Draws(places, tokens, q)
