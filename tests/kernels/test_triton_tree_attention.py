"""Tree attention on a GPU, run by Triton's interpreter, against its definition."""

from pathlib import Path

import torch
import tree_attention_cases as cases
from interpreter import outputs_of

from vllm_specinfer.kernels.triton import tiles


def test_rows_see_their_paths_and_nothing_else_is_written(tmp_path: Path) -> None:
    outputs = outputs_of(cases, tmp_path)
    assert len(outputs) == len(list(cases.small_steps()))
    for found, expected in outputs:
        assert not expected.isnan().all()
        cases.assert_close(found, expected)


def test_programs_fill_the_device(monkeypatch):
    monkeypatch.setattr(tiles, "_num_sms", lambda _: 132)
    device = torch.device("cpu")
    assert tiles.choose_num_programs(8, device) == 33
    assert tiles.choose_num_programs(512, device) == 1
