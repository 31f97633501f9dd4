"""Log-probabilities that are asked for beside others, whatever those are of."""

import torch

from vllm_specinfer.kernels.cpu import logprobs


def test_a_placeholder_beyond_the_vocabulary_harms_no_other_row():
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 4.0, 3.0]])
    ids = torch.tensor([[2], [7]])
    found, ranks = torch.empty(2, 1), torch.empty(2, dtype=torch.int64)
    logprobs.topk_log_softmax(found, logits, 3, ids, 1, 1, 3)
    logprobs.ranks(ranks, logits, 3, ids[:, 0], 3)
    torch.testing.assert_close(found[0, 0], logits[0].log_softmax(0)[2])
    assert ranks[0] == 2
