"""Tree attention on a GPU, run by Triton's interpreter, against its definition."""

from pathlib import Path

import pytest
import torch
import tree_attention_cases as cases
from interpreter import outputs_of

from vllm_specinfer.kernels.triton import tiles
from vllm_specinfer.kernels.triton import tree_attention as kernels
from vllm_specinfer.kernels.triton.row_blocks import RowBlocks


def test_rows_see_their_paths_and_nothing_else_is_written(tmp_path: Path) -> None:
    outputs = outputs_of(cases, tmp_path)
    assert len(outputs) == len(list(cases.small_steps()))
    for found, expected in outputs:
        assert not expected.isnan().all()
        cases.assert_close(found, expected)


def test_a_window_that_could_end_among_the_nodes_is_refused() -> None:
    arguments = cases.step(cases.MIXED, words=2)
    out = torch.empty_like(arguments["query"])
    blocks = RowBlocks.room(9, torch.device("cpu"))
    with pytest.raises(ValueError, match="at least 128 .* got 127"):
        kernels.tree_attention(
            **arguments, out=out, max_query_len=9, row_blocks=blocks, window=127
        )


def test_programs_fill_the_device(monkeypatch):
    monkeypatch.setattr(tiles, "_num_sms", lambda _: 132)
    device = torch.device("cpu")
    assert tiles.choose_num_programs(8, device) == 33
    assert tiles.choose_num_programs(512, device) == 1
