"""Tree attention on a GPU, run by Triton's interpreter, against its definition."""

from pathlib import Path

import numpy as np
import pytest
import torch
import tree_attention_cases as cases
from interpreter import outputs_of

from vllm_specinfer.kernels.triton import tiles
from vllm_specinfer.kernels.triton import tree_attention as kernels
from vllm_specinfer.kernels.triton.row_blocks import RowBlocks, max_row_blocks


def test_rows_see_their_paths_and_nothing_else_is_written(tmp_path: Path) -> None:
    outputs = outputs_of(cases, tmp_path)
    assert len(outputs) == len(list(cases.small_steps()))
    for found, expected in outputs:
        assert not expected.isnan().all()
        cases.assert_close(found, expected)


def test_a_window_that_could_end_among_the_nodes_is_refused() -> None:
    arguments = cases.step(cases.MIXED, words=2)
    out = torch.empty_like(arguments["query"])
    with pytest.raises(ValueError, match="at least 128 .* got 127"):
        kernels.tree_attention(**arguments, out=out, max_query_len=9, window=127)


def test_programs_fill_the_device(monkeypatch):
    monkeypatch.setattr(tiles, "_num_sms", lambda _: 132)
    device = torch.device("cpu")
    assert tiles.choose_num_programs(8, device) == 33
    assert tiles.choose_num_programs(512, device) == 1


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_row_that_is_attended_is_in_one_block(rows) -> None:
    rng = np.random.default_rng(rows)
    for _ in range(50):
        counts = rng.integers(0, 40, size=rng.integers(1, 9)) * rng.integers(0, 2)
        num_rows, num_reqs = int(counts.sum()), len(counts)
        attended = rng.random(num_reqs) < 0.7 if rng.random() < 0.5 else None
        most = max_row_blocks(num_rows, num_reqs, rows)
        blocks = RowBlocks.room(most, torch.device("cpu"))
        starts = torch.tensor([0, *counts.cumsum()], dtype=torch.int32)
        blocks.fill(starts, rows, None if attended is None else torch.tensor(attended))
        wanted = [
            (r, place)
            for r in range(num_reqs)
            if attended is None or attended[r]
            for place in range(-(-int(counts[r]) // rows))
        ]
        found = zip(blocks.requests.tolist(), blocks.places.tolist(), strict=True)
        assert list(found)[: blocks.count.item()] == wanted
        assert len(wanted) <= most


def test_requests_with_as_many_rows_have_as_many_blocks() -> None:
    blocks = RowBlocks.uniform(3, 2, torch.device("cpu"))
    assert blocks.requests.tolist() == [0, 0, 1, 1, 2, 2]
    assert blocks.places.tolist() == [0, 1] * 3 and blocks.count.tolist() == [6]
