"""Log probabilities of emitted tokens, put together from parts of a step's rows."""

from collections.abc import Iterable

import torch
from vllm.v1.outputs import LogprobsTensors


def taken(
    found: LogprobsTensors,
    rows: torch.Tensor,
    starts: list[int] | None = None,
) -> LogprobsTensors:
    """Some rows of a table; `starts` says where each request's begin."""
    return LogprobsTensors(
        found.logprob_token_ids[rows],
        found.logprobs[rows],
        found.selected_token_ranks[rows],
        starts,
    )


def placed(
    num_rows: int,
    parts: Iterable[tuple[torch.Tensor | slice, LogprobsTensors | None]],
) -> LogprobsTensors | None:
    """One table of several; zeros where nobody wants any.

    Args:
        num_rows: Of the table.
        parts: Rows of the table and what stands there, as wide as the requests of that
            part want; None where they want nothing.

    Returns:
        The table, None where nobody wants anything.
    """
    found = [(rows, part) for rows, part in parts if part is not None]
    if not found:
        return None
    width = max(part.logprobs.shape[1] for _, part in found)
    like = found[0][1]
    ids = like.logprob_token_ids.new_zeros(num_rows, width)
    logprobs = like.logprobs.new_zeros(num_rows, width)
    ranks = like.selected_token_ranks.new_zeros(num_rows)
    for rows, part in found:
        columns = slice(0, part.logprobs.shape[1])
        ids[rows, columns] = part.logprob_token_ids
        logprobs[rows, columns] = part.logprobs
        ranks[rows] = part.selected_token_ranks
    return LogprobsTensors(ids, logprobs, ranks)
