"""A folder that training begins in."""

import os

import pytest
import torch

from vllm_specinfer import cli
from vllm_specinfer.evidence import engines
from vllm_specinfer.tuning.settings import SETTINGS_FILE, PoolSettings, open_folder


def test_what_a_kill_left_of_the_first_file_is_in_nobodys_way(tmp_path):
    (tmp_path / "prompts").touch()
    settings = PoolSettings(target="target", prompts=str(tmp_path / "prompts"))
    out = tmp_path / "out"
    left = out / ".left" / SETTINGS_FILE
    left.parent.mkdir(parents=True)
    left.touch()
    open_folder(out, settings, [], {})
    assert (out / SETTINGS_FILE).is_file()
    (out / SETTINGS_FILE).rename(out / "mine.txt")
    with pytest.raises(ValueError, match="must be empty or begun before"):
        open_folder(out, settings, [], {})


def test_prompts_may_change_until_something_is_made_of_them(tmp_path):
    file, out = tmp_path / "prompts", tmp_path / "out"
    settings = PoolSettings(target="target", prompts=str(file))
    for content in ("one\n", "one\ntwo\n"):
        file.write_text(content)
        open_folder(out, settings, [], {})
    (out / "samples.jsonl").touch()
    open_folder(out, settings, [], {})
    with file.open("a") as prompts:
        prompts.write("three\n")
    with pytest.raises(ValueError, match="must be as it was when .* was begun; got"):
        open_folder(out, settings, [], {})


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
