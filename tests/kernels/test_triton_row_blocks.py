"""Blocks of query rows that a Triton kernel lays out, in the interpreter."""

import row_blocks_cases as cases
import torch
from interpreter import outputs_of

from vllm_specinfer.kernels.triton.row_blocks import RowBlocks


def test_every_row_that_is_attended_is_in_one_block(tmp_path) -> None:
    check(outputs_of(cases, tmp_path))


def check(outputs) -> None:
    """Compare with the definition; also on a GPU (`benchmarks/cuda_kernels.py`)."""
    most = 0
    for seed, found in zip(cases.SEEDS, outputs, strict=True):
        counts, attended, rows = cases.step_of(seed)
        wanted = [
            (r, place)
            for r, count in enumerate(counts.tolist())
            if attended[r]
            for place in range(-(-count // rows))
        ]
        requests, places, count = (values.tolist() for values in found)
        blocks = list(zip(requests, places, strict=True))
        assert blocks[: count[0]] == wanted and count[0] == len(wanted) <= len(blocks)
        most = max(most, len(wanted))
    assert most > 700


def test_requests_with_as_many_rows_have_as_many_blocks() -> None:
    blocks = RowBlocks.uniform(3, 2, torch.device("cpu"))
    assert blocks.requests.tolist() == [0, 0, 1, 1, 2, 2]
    assert blocks.places.tolist() == [0, 1] * 3 and blocks.count.tolist() == [6]
