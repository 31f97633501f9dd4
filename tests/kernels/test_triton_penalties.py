"""Penalties along the paths of trees, in the interpreter, are vLLM's."""

import penalties_cases as cases
import torch
from interpreter import outputs_of


def test_rows_are_penalised_for_their_own_paths(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for found, expected in outputs:
        # A compiler may contract one of them more than the other.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
