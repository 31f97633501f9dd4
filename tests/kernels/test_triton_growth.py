"""Levels that the Triton kernels grow, run by the interpreter, are the definition's."""

import growth_cases as cases
import torch
from interpreter import outputs_of


def test_levels_and_passes_over_them_are_those_of_the_definition(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs: list) -> None:
    num_nodes = 0
    for found in outputs:
        for ours, theirs in found:
            assert ours.shape == theirs.shape
            assert torch.equal(ours, theirs.to(ours.dtype))
            num_nodes += int(theirs.sum()) if theirs.dtype == torch.bool else 0
    assert num_nodes > 900
