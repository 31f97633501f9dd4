"""A folder that training begins in."""

import dataclasses
import fcntl
import json
import os
import shutil
import sys

import pytest
import torch
from vllm import EngineArgs

from vllm_specinfer import cli
from vllm_specinfer.evidence import engines
from vllm_specinfer.tuning.settings import (
    FREE_OF_ENGINE,
    SETTINGS_FILE,
    PoolSettings,
    open_folder,
)


def test_what_a_kill_left_of_the_first_file_is_in_nobodys_way(tmp_path):
    (tmp_path / "prompts").touch()
    settings = PoolSettings(target="target", prompts=str(tmp_path / "prompts"))
    out = tmp_path / "out"
    left = out / ".left" / SETTINGS_FILE
    left.parent.mkdir(parents=True)
    left.touch()
    open_folder(out, settings, {})
    assert (out / SETTINGS_FILE).is_file()
    (out / SETTINGS_FILE).rename(out / "mine.txt")
    with pytest.raises(ValueError, match="must be empty or begun before"):
        open_folder(out, settings, {})


def test_prompts_may_change_until_something_is_made_of_them(tmp_path):
    file, out = tmp_path / "prompts", tmp_path / "out"
    settings = PoolSettings(target="target", prompts=str(file))
    for content in ("one\n", "one\ntwo\n"):
        file.write_text(content)
        open_folder(out, settings, {})
    (out / "samples.jsonl").touch()
    open_folder(out, settings, {})
    with file.open("a") as prompts:
        prompts.write("three\n")
    with pytest.raises(ValueError, match="must be as it was when .* was begun; got"):
        open_folder(out, settings, {})


def test_what_only_takes_memory_or_adds_ssms_may_change(tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts").write_text("one\n")
    shutil.copy(tmp_path / "prompts", tmp_path / "copy")
    out = tmp_path / "out"

    def go_on(**changes):
        wanted = {"target": "target", "prompts": str(tmp_path / "prompts"), **changes}
        monkeypatch.setattr(sys, "argv", [str(changes)])
        open_folder(out, PoolSettings(**wanted), {})
        return json.loads((out / SETTINGS_FILE).read_text())

    begun = go_on(engine={"dtype": "float32", "max_num_seqs": 64})
    (out / "samples.jsonl").touch()
    less = {"engine": {"dtype": "float32", "gpu_memory_utilization": 0.5}}
    less |= {"batch_size": 4, "num_ssms": 3, "prompts": str(tmp_path / "copy")}
    record = go_on(**less)
    assert "goes on with prompts" in capsys.readouterr().out
    assert record["settings"]["batch_size"] == 4
    assert record["earlier"] == [{k: v for k, v in begun.items() if k != "earlier"}]
    assert go_on(**less) == record and not capsys.readouterr().out
    fewer = {"num_ssms": 2}
    for change in ({"epochs": 5}, {"engine": {"dtype": "bfloat16"}}, fewer):
        with pytest.raises(ValueError, match=f"begun with other .*{[*change][0]}"):
            go_on(**less | change)
    assert go_on(**less) == record


def test_nobody_else_tunes_in_a_folder(tmp_path):
    (tmp_path / "prompts").touch()
    settings = PoolSettings(target="target", prompts=str(tmp_path / "prompts"))
    one, two = tmp_path / "one", tmp_path / "two"
    for _ in range(2):
        open_folder(one, settings, {})
    folder = os.open(one, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    two.mkdir()
    folder = os.open(two, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="two must have one command at a time; got"):
        open_folder(two, settings, {})
    assert not any(two.iterdir())
    os.close(folder)
    open_folder(two, settings, {})


def test_engines_have_the_arguments_that_may_change():
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert set(FREE_OF_ENGINE) <= fields


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
