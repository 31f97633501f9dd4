"""Random candidates of a source, level by level, and the union of several."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

VOCAB = 5


def grown(
    rng: np.random.Generator, num_reqs: int, most: int = 7
) -> tuple[tuple[np.ndarray, ...], list[int]]:
    """Tokens, parents and scores by level, and `ends`.

    Siblings hold distinct tokens; there are ties, and columns that are none.

    Args:
        rng: Where they are drawn from.
        num_reqs: R.
        most: More candidates than a level has.
    """
    sizes = rng.integers(1, most, rng.integers(1, 5)).tolist()
    ends = list(accumulate(sizes))
    tokens = np.zeros((num_reqs, ends[-1]), np.int64)
    parents = np.full(tokens.shape, -1)
    scores = np.full(tokens.shape, -np.inf, np.float32)
    for r in range(num_reqs):
        seen = set()
        for start, end, depth in zip([0, *ends], ends, range(9), strict=False):
            for c in range(start, end):
                first = 0 if depth < 2 else ends[depth - 2]
                parent = int(rng.integers(first, start)) if depth else -1
                above = scores[r, parent] if depth else 0.0
                token = int(rng.integers(VOCAB))
                known = (parent, token) in seen or not np.isfinite(above)
                tokens[r, c], parents[r, c] = token, parent
                if not known and rng.random() < 0.8:
                    seen.add((parent, token))
                    scores[r, c] = above - rng.integers(0, 4) / 4
    return (tokens, parents, scores), ends


def united(sources: Sequence[Any]) -> tuple[Any, np.ndarray]:
    """What `merge` says, in columns of all sources one after the other.

    Returns:
        The union, each path where it is first; [R, C] where each candidate's path is,
        and its own column where it is none.
    """
    from vllm_specinfer.tree.candidates import Candidates, merge

    union, places = merge(sources)
    scores = np.concatenate([source.scores for source in sources], axis=1)
    columns = np.tile(np.arange(scores.shape[1]), (len(scores), 1))
    laid_out = Candidates.empty(*scores.shape)
    for r, live in enumerate(np.isfinite(scores)):
        paths = np.concatenate([of_source[r] for of_source in places])[live]
        nodes, firsts = np.unique(paths, return_index=True)
        firsts = columns[r, live][firsts]
        first_of = np.full(union.tokens.shape[1] + 1, -1)  # the root's, too
        first_of[nodes] = firsts
        columns[r, live] = first_of[paths]
        laid_out.parents[r, firsts] = first_of[union.parents[r, nodes]]
        laid_out.tokens[r, firsts] = union.tokens[r, nodes]
        laid_out.scores[r, firsts] = union.scores[r, nodes]
    return laid_out, columns
