"""Likeliest tokens by a Triton kernel, run by the interpreter, are the definition's."""

import likeliest_cases as cases
import torch
from interpreter import outputs_of

from vllm_specinfer.kernels.triton import likeliest as kernel


def test_likeliest_tokens_are_those_of_the_definition(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs: list) -> None:
    """Also on a GPU (`benchmarks/cuda_kernels.py`)."""
    num_ties = num_impossible = num_nan = 0
    for (values, tokens), (wanted, wanted_tokens) in outputs:
        values, tokens = values.cpu(), tokens.cpu()
        assert values.dtype == torch.float32 and tokens.equal(wanted_tokens)
        torch.testing.assert_close(values, wanted, atol=2e-5, rtol=2e-6, equal_nan=True)
        num_ties += int((wanted[:, 1:] == wanted[:, :-1]).sum())
        num_impossible += int((wanted == -torch.inf).sum())
        num_nan += int(wanted.isnan().sum())
    assert min(num_ties, num_impossible, num_nan) > 100


def test_many_tokens_and_whole_vocabularies_are_not_for_the_kernel() -> None:
    assert kernel.takes(torch.empty(1, 32768), 16)
    assert not kernel.takes(torch.empty(1, 32768), 17)
    assert not kernel.takes(torch.empty(1, 32769), 16)
