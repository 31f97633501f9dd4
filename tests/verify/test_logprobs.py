"""Log probabilities of parts of a step, put together."""

import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_specinfer.verify.logprobs import placed


def some(num_rows: int, width: int, first: int) -> LogprobsTensors:
    ids = first + torch.arange(num_rows * width).view(num_rows, width)
    return LogprobsTensors(ids, -ids.float(), ids[:, 0])


def test_parts_of_any_width_stand_where_they_belong():
    wide, narrow = some(2, 3, 10), some(1, 2, 50)
    parts = [(torch.tensor([4, 0]), wide), (slice(1, 2), None), (slice(3, 4), narrow)]
    found = placed(5, parts)
    ids = [[13, 14, 15], [0, 0, 0], [0, 0, 0], [50, 51, 0], [10, 11, 12]]
    assert found.logprob_token_ids.tolist() == ids
    assert (found.logprobs == -torch.tensor(ids).float()).all()
    assert found.selected_token_ranks.tolist() == [13, 0, 0, 50, 10]


def test_nobody_wants_any():
    assert placed(3, [(slice(0, 3), None)]) is None
