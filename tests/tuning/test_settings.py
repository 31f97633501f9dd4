"""A folder that training begins in."""

import os

import pytest
import torch

from vllm_specinfer import cli
from vllm_specinfer.evidence import engines
from vllm_specinfer.tuning.settings import SETTINGS_FILE, PoolSettings, open_folder


def test_what_a_kill_left_of_the_first_file_is_in_nobodys_way(tmp_path):
    settings = PoolSettings(target="target", prompts="prompts")
    left = tmp_path / ".left" / SETTINGS_FILE
    left.parent.mkdir()
    left.touch()
    open_folder(tmp_path, settings, [])
    assert (tmp_path / SETTINGS_FILE).is_file()
    (tmp_path / SETTINGS_FILE).rename(tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="must be empty or begun before"):
        open_folder(tmp_path, settings, [])


def test_no_engine_is_forked_once_torch_was_asked_for_gpus(monkeypatch, tmp_path):
    def stop(arguments):
        raise RuntimeError

    environment = {}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engines, "check_arguments", stop)
    options = ["--target", "t", "--prompts", "p", "--out", str(tmp_path)]
    with pytest.raises(RuntimeError):
        cli.main(["tune", *options])
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
