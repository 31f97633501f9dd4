"""The benchmarks that README.md names run, on tiny models."""

import csv
import json
import os
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers import LlamaForCausalLM

from tests import processes
from tests.e2e import run_all
from tests.e2e.models import VOCAB

ROOT = Path(__file__).parents[2]


def run_script() -> None:
    """The script that is this process's first argument."""
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


def run(tmp_path: Path, name: str, *arguments: str) -> str:
    """What a script prints."""
    arguments = (ROOT / "benchmarks" / name, *arguments)
    little = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    return processes.run(run_script, arguments, tmp_path / "output", **little)


def test_memory_pressure_load_and_step_profile_measure_what_they_say(tiny, tmp_path):
    target, ssm = tiny["target"], tiny["ssm"]
    pool = tmp_path / "pool"
    shutil.copytree(ssm, pool / "ssm0")
    (pool / "manifest.json").write_text('{"ssms": [{"model": "ssm0"}]}')
    sizes = {"--prompts": 2, "--batch": 2, "--max-tokens": 8, "--turns": 1}
    pressure = [f"{name}={value}" for name, value in sizes.items()]
    load = ["--pool", pool, "--out", tmp_path / "load", "--ssms", "good", "wrong"]
    load += ["--batches", 2, "--max-prompts", 4, "--max-tokens", 8, "--starts", 1]
    load += ["--engine", tiny["engine"]]
    profile = ["--ssm", ssm, "--data", tiny["prompts"], "--prompts", 3, "--eager"]
    profile += ["--max-tokens", 24, "--scheduler", "static"]
    common = ["--target", target]
    pressed = run(tmp_path, "memory_pressure.py", *common, "--ssm", ssm, *pressure)
    run(tmp_path, "load.py", *common, *map(str, load))
    profiled = run(tmp_path, "step_profile.py", *common, *map(str, profile))
    turns = re.findall(r"turn 0, slots (.+): [\d.]+ tokens/s, 0 preemptions, ", pressed)
    assert turns == ["kept", "given up"]
    with (tmp_path / "load" / "table.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["method"] for row in rows] == ["plain", "good", "wrong"]
    assert {(row["identical"], row["texts"]) for row in rows} == {("4", "4")}
    assert "tokens per step; 3 texts identical" in profiled
    assert float(re.search(r"([\d.]+) tokens per step", profiled)[1]) > 1.3
    assert "  of it KV commit" in profiled
    for label in ("target forward", "drafting"):
        assert re.search(rf"^{label} +1\.00 a step", profiled, re.MULTILINE)
    step = float(re.search(r"one step: ([\d.]+) ms", profiled)[1])
    found = re.search(
        r"bookkeeping: ([\d.]+) ms, ([\d.]+)% of a step \((.+)\)", profiled
    )
    own, share = float(found[1]), float(found[2])
    assert share == pytest.approx(100 * own / step, rel=0.05) and 0 < share < 60
    parts = dict(part.split() for part in found[3].split(", "))
    assert list(parts) == ["build", "merge", "verify", "commit", "policy"]
    assert sum(map(float, parts.values())) == pytest.approx(own, abs=0.03)
    assert min(float(parts[name]) for name in parts if name != "policy") > 0


def test_a_target_of_wider_layers_computes_the_same(tiny, tmp_path):
    script = runpy.run_path(str(ROOT / "benchmarks" / "wider_target.py"))
    source, out = Path(tiny["target"]), tmp_path / "wider"
    script["widen"](source, out)
    before, after = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (source, out)
    )
    for layer in ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"):
        shapes = (
            next(w.shape for name, w in model.named_parameters() if layer in name)
            for model in (before, after)
        )
        old, new = map(torch.tensor, shapes)
        assert (new == 4 * old).all()
    ids = torch.arange(40)[None] % VOCAB
    with torch.inference_mode():
        torch.testing.assert_close(after(ids).logits, before(ids).logits)
    with pytest.raises(FileExistsError):
        script["widen"](source, out)
    config = json.loads((source / "config.json").read_text())
    other = shutil.copytree(source, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    with pytest.raises(ValueError, match="must be a Llama without biases"):
        script["widen"](other, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_plain_decoding_on_both_runners_is_measured(tiny, tmp_path):
    sizes = "--modes eager --batches 1 --repeats 1 --passes 1 --tokens 8"
    arguments = ["--model", tiny["target"], *sizes.split()]
    shown = run(tmp_path, "plain_decoding.py", *arguments)
    title, row = re.findall("^(?:mode|eager) .*$", shown, re.MULTILINE)
    assert title.split()[-2:] == ["same", "text"]
    mode, batch, v1, v2, ratio, *_, same = row.split()
    assert (mode, batch, same) == ("eager", "1", "True")
    assert float(ratio) == pytest.approx(float(v2) / float(v1), rel=0.05)


def test_all_prompts_are_compared(tiny, monkeypatch, capsys):
    options = "--prompts 4 --max-tokens 12 --batches 2 --trees 2,2,1 best-first --eager"
    models = ["--target", tiny["target"], "--ssm", tiny["ssm"]]
    data = ["--data", tiny["prompts"], "--scheduler", "static"]
    monkeypatch.setattr(sys, "argv", ["run_all", *models, *data, *options.split()])
    run_all.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0][-10:] for line in lines] == ["tree 2,2,1", "best-first"]
    for line in lines:
        found = re.search(r"4 of 4 identical, ([\d.]+) tokens per step", line)
        assert float(found[1]) > 1.3


def test_kernels_whose_tests_ask_nothing_of_their_outputs_are_not_right():
    script = runpy.run_path(str(ROOT / "benchmarks" / "cuda_kernels.py"))
    with pytest.raises(ValueError, match="must have a function of `outputs` alone"):
        script["_check_tests"]("tree_attention", "cpu")


def test_time_inside_watched_calls_is_not_their_callers(monkeypatch):
    with mock.patch.dict(os.environ):
        script = runpy.run_path(str(ROOT / "benchmarks" / "step_profile.py"))
    now = 0.0
    monkeypatch.setattr(script["time"], "perf_counter", lambda: now)

    def passes(seconds):
        nonlocal now
        now += seconds

    def outer():
        passes(1)
        holder.inner()
        holder.model()
        passes(2)

    def inner():
        passes(4)
        holder.model()

    holder = SimpleNamespace(outer=outer, inner=inner, model=lambda: passes(8))
    times = script["Times"]()
    times.watch(holder, "outer", "whole", "build")
    times.watch(holder, "inner", None, "verify")
    times.watch(holder, "model", "pass")
    holder.outer()
    holder.outer()
    assert times.own == {"build": 6, "verify": 8}
    assert times.calls == {"whole": [23, 23], "pass": [8] * 4}


def test_a_device_is_busy_while_any_of_its_work_runs():
    share = runpy.run_path(str(ROOT / "benchmarks" / "cuda_goals.py"))["busy_share"]
    # From 10 to 20: 12 to 13, 16 to 16.5 and 19 to 19.5 are idle.
    spans = [(13, 16), (10, 11), (10.5, 12), (16.5, 19), (17, 18), (19.5, 20)]
    assert share(spans) == pytest.approx(0.8)
    assert share(spans, 0.6) == pytest.approx(0.9)
    assert share([(3, 4)]) == 1
    with pytest.raises(ValueError, match="got none"):
        share([])
