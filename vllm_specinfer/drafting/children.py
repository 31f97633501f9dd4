"""Which children a node gets: the SSM's likeliest tokens, or draws.

Greedy requests take the likeliest. A sampled request's children depend on how its tree
will be verified:

- coupled: the target's token is the argmax of its scaled logits plus noise of (seed,
  position, token). The SSM's logits with the same noise have the same argmax whenever
  the models agree well enough, so the best tokens of that sum guess the draw itself.
- mss, naive: independent draws from the SSM's distribution q; rrs: draws without
  replacement. They are tested against q, so their randomness is their own.

Draws come from the `NUM_CANDIDATES` likeliest tokens, renormalised: q is whatever the
draws are made from, and so little of it is all that a test needs to remember.

Dimension legend: R requests, F rows of one level, M likeliest tokens of each, K
children.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_specinfer.noise import DRAFT_NOISE_SALT, gumbel_noise, uniform
from vllm_specinfer.options import MAX_NUM_SPECULATIVE_TOKENS
from vllm_specinfer.tree.proposals import NO_DRAW, Draws
from vllm_specinfer.tree.token_tree import ROOT

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.states import SamplingStates

NUM_CANDIDATES = 128

# A first guess of how often a test accepts: this where q is flat, 1 where q is sure.
FLAT_ACCEPTANCE = 0.4
# Counters of a tree lie this far apart, node by node.
MAX_CHILDREN = MAX_NUM_SPECULATIVE_TOKENS
_SEED_STEP = 0x9E3779B97F4A7C15  # seeds of the sources of one engine lie this far apart

# What `coupled_children` is.
Coupled = Callable[..., tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class DraftRows:
    """What the choice of children depends on besides the SSM, for F rows.

    Attributes:
        seeds: [F] int64 of the rows' requests.
        roots: [F] int64, the position of each tree's root.
        depths: [F] of each row's node; the root's is 0.
        nodes: [F] a number of each row's node that no other node of its tree has.
        temperatures: [F] float32, 0 for greedy requests.
        top_k: [F] the request's, at least the vocabulary size for none.
        top_p: [F] float32.
        min_p: [F] float32.
    """

    seeds: np.ndarray
    roots: np.ndarray
    depths: np.ndarray
    nodes: np.ndarray
    temperatures: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    @classmethod
    def of_roots(
        cls, sampling: "SamplingStates", slots: np.ndarray, positions: np.ndarray
    ) -> "DraftRows":
        """The roots of trees.

        Args:
            sampling: vLLM's sampling parameters of all slots.
            slots: [R] request slots.
            positions: [R] of the roots.
        """
        return cls(
            seeds=sampling.seeds.np[slots],
            roots=positions,
            depths=np.zeros(len(slots), np.int64),
            nodes=np.full(len(slots), ROOT),
            temperatures=sampling.temperature.np[slots],
            top_k=sampling.top_k.np[slots],
            top_p=sampling.top_p.np[slots],
            min_p=sampling.min_p.np[slots],
        )

    @functools.cached_property
    def sampled(self) -> bool:
        """Some of them are not greedy."""
        return any(self.temperatures.tolist())

    def below(self, rows: np.ndarray, depth: int, nodes: np.ndarray) -> "DraftRows":
        """Rows of the same trees deeper down: `rows` [F'] choose among the roots."""
        return DraftRows(
            seeds=self.seeds[rows],
            roots=self.roots[rows],
            depths=np.full(len(rows), depth),
            nodes=nodes,
            temperatures=self.temperatures[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
        )


@dataclass(frozen=True)
class Children:
    """The children of F rows.

    Attributes:
        scores: [F, K] float32 log of the estimated chance that verification accepts
            the child once it stands at the row; -inf where there is none.
        tokens: [F, K] int64, distinct where the score is finite.
        draws: What the tests of sampled rows need; None where nothing was drawn.
    """

    scores: np.ndarray
    tokens: np.ndarray
    draws: Draws | None = None


class ChildChooser:
    """Chooses children by one verification rule."""

    def __init__(
        self,
        verification: str,
        source: int = 0,
        coupled: Coupled | None = None,
    ) -> None:
        """Make the chooser of one source.

        Args:
            verification: "coupled", "mss", "rrs" or "naive".
            source: Its number: the draws of two sources must be independent.
            coupled: Does what `coupled_children` does, which is the default.
        """
        # Whether children are drawn by random numbers of their own.
        self.draws = verification != "coupled"
        self._best = coupled or coupled_children
        self._seed_offset = np.uint64(source * _SEED_STEP % 2**64)
        # Whether a token may be drawn again.
        self.replaces = verification != "rrs"

    def draw_seeds(self, seeds: np.ndarray) -> np.ndarray:
        """Int64 seeds of this source's draws, given those of requests."""
        return (seeds.astype(np.uint64) + self._seed_offset).astype(np.int64)

    def num_candidates(self, num_children: int, rows: DraftRows) -> int:
        """How many of the likeliest tokens `choose` wants to see (M)."""
        return max(num_children, NUM_CANDIDATES if rows.sampled else 0)

    def choose(
        self,
        logprobs: np.ndarray,
        tokens: np.ndarray,
        num_children: int,
        rows: DraftRows,
    ) -> Children:
        """Choose K children of each row.

        Args:
            logprobs: [F, M] float32 of the SSM, descending.
            tokens: [F, M] int64.
            num_children: K; fewer where M is less.
            rows: The rows' requests and places.
        """
        k = min(num_children, tokens.shape[1])
        scores, children = logprobs[:, :k], tokens[:, :k]
        if not rows.sampled:
            return Children(scores, children)
        scores, children = scores.copy(), children.copy()
        sampled = np.flatnonzero(rows.temperatures)
        if not self.draws:
            if len(sampled) == len(tokens):
                sampled = slice(None)  # views, no copies
            scores[sampled], children[sampled] = self._best(
                logprobs[sampled],
                tokens[sampled],
                rows.seeds[sampled],
                (rows.roots + rows.depths)[sampled],
                rows.temperatures[sampled],
                rows.top_k[sampled],
                rows.top_p[sampled],
                rows.min_p[sampled],
                k,
            )
            return Children(scores, children)
        q = _sampling_distribution(
            logprobs, rows.temperatures, rows.top_k, rows.top_p, rows.min_p
        )
        is_drawn = rows.temperatures[:, None] > 0
        drawn, places, drawn_from = _drawn(
            q * is_drawn, self._uniforms(rows, k), self.replaces
        )
        found = np.take_along_axis(tokens, places, axis=1)
        return Children(
            np.where(is_drawn, drawn, scores),
            np.where(is_drawn, np.where(places == NO_DRAW, 0, found), children),
            Draws(places, tokens, drawn_from),
        )

    def _uniforms(self, rows: DraftRows, count: int) -> np.ndarray:
        """[F, count] randomness of the rows' draws: every node has its own."""
        # The root's position, not the row's: no two steps may share a draw.
        return uniform(
            self.draw_seeds(rows.seeds),
            rows.roots + DRAFT_NOISE_SALT,
            np.arange(count) + (rows.nodes[:, None] + 1) * MAX_CHILDREN,
        )


def _sampling_distribution(
    logprobs: np.ndarray,
    temperatures: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
) -> np.ndarray:
    """[F, M] float64: the SSM's distribution under the requests' parameters."""
    temperature = np.where(temperatures > 0, temperatures, 1.0)[:, None]
    q = np.exp((logprobs - logprobs[:, :1]).astype(np.float64) / temperature)
    q[q < min_p[:, None] * q[:, :1]] = 0
    q[np.arange(q.shape[1]) >= top_k[:, None]] = 0
    q /= q.sum(axis=1, keepdims=True)
    before = np.cumsum(q, axis=1) - q
    q[(before >= top_p[:, None]) & (top_p[:, None] < 1)] = 0
    return q / q.sum(axis=1, keepdims=True)


def coupled_children(
    logprobs: np.ndarray,
    tokens: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    temperatures: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The K best of log q + the target's noise.

    Args:
        logprobs: [F, M] float32 of the SSM, descending.
        tokens: [F, M].
        seeds: [F] of the rows' requests, as are the four parameters below.
        positions: [F].
        temperatures: [F] above 0.
        top_k: [F].
        top_p: [F].
        min_p: [F].
        k: K, at most M.

    Returns:
        Scores [F, K] and tokens [F, K].
    """
    q = _sampling_distribution(logprobs, temperatures, top_k, top_p, min_p)
    with np.errstate(divide="ignore"):
        values = np.log(q) + gumbel_noise(seeds, positions, tokens)
    places = np.argsort(-values, axis=1, kind="stable")[:, :k]
    best = np.take_along_axis(values, places, axis=1)
    top = best[:, :1]
    total = np.log(np.exp(values - top).sum(axis=1, keepdims=True)) + top
    return best - total, np.take_along_axis(tokens, places, axis=1)


def _drawn(
    q: np.ndarray, uniforms: np.ndarray, replaces: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws from q [F, M] by uniforms [F, K]; none where q is 0.

    Returns:
        Scores [F, K], places [F, K], `NO_DRAW` once nothing is left, and what each was
        drawn from [F, K, M].
    """
    num_rows, k = uniforms.shape
    rows, num_candidates = np.arange(num_rows), q.shape[1]
    scores = np.full((num_rows, k), -np.inf, np.float32)
    places = np.full((num_rows, k), NO_DRAW, np.int64)
    drawn_from = np.zeros((num_rows, k, num_candidates))
    reached = np.ones(num_rows)  # the chance that every earlier test rejects
    for j in range(k):
        drawn_from[:, j] = q
        # Rounding may end the sums a hair below u.
        last = num_candidates - 1 - (q[:, ::-1] > 0).argmax(axis=1)
        place = (np.cumsum(q, axis=1) <= uniforms[:, j : j + 1]).sum(axis=1)
        place = np.minimum(place, last)
        repeated = (places[:, :j] == place[:, None]).any(axis=1)
        chance = q[rows, place]
        left = chance > 0
        places[left, j] = place[left]
        new = left & ~repeated  # else it shares the first one's node
        accepted = FLAT_ACCEPTANCE + (1 - FLAT_ACCEPTANCE) * chance
        scores[new, j] = np.log((reached * accepted)[new])
        reached[new] *= 1 - np.minimum(accepted[new], 1 - 1e-6)
        if not replaces:
            q = q.copy()
            q[rows, place] = 0
            total = q.sum(axis=1, keepdims=True)
            q /= np.where(total > 0, total, 1)
    return scores, places, drawn_from
