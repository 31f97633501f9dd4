"""`vllm-specinfer bench --served` measures servers with vLLM's own client."""

import csv
import json
import signal
import subprocess
import sys
import time

import pytest

from vllm_specinfer.evidence import served
from vllm_specinfer.evidence.bench import BenchSettings
from vllm_specinfer.evidence.served import bench_served, flags

MAX_TOKENS = 8
PROMPTS = 6


def test_a_server_answers_all_prompts(tiny, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    settings = BenchSettings(
        tiny["target"],
        configs={
            "specinfer": {
                "method": "specinfer",
                "model": tiny["ssm"],
                "scheduler": "static",
            }
        },
        prompts=[tiny["prompts"]],
        batches=[2],
        max_prompts=PROMPTS,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        engine=json.loads(tiny["engine"]),
    )
    table = bench_served(tmp_path, settings)
    assert table == (tmp_path / "served.md").read_text()
    with (tmp_path / "served.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["method"] for row in rows] == ["plain", "specinfer"]
    for row in rows:
        assert row["batch"] == "2" and float(row["tokens/s"]) > 1
        assert float(row["ms to first token"]) > 0 < float(row["ms per token"])
    plain, trees = (float(row["tokens/s"]) for row in rows)
    assert float(rows[0]["tokens/s, ratio"]) == 1
    assert float(rows[1]["tokens/s, ratio"]) == pytest.approx(trees / plain, rel=0.02)
    log = (tmp_path / "driver.log").read_text().splitlines()
    # The warm-up is not among them.
    generated = [line.split()[-1] for line in log if "Total generated" in line]
    assert generated == 2 * [str(PROMPTS * MAX_TOKENS)]


def test_a_server_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    started, popen = [], subprocess.Popen

    def stubborn(command, **options):
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"
        started.append(popen([sys.executable, "-c", code], **options))
        return started[0]

    def answers(process, url, log):
        time.sleep(1)  # until it ignores the signal
        raise ValueError("does not answer")

    monkeypatch.setattr(subprocess, "Popen", stubborn)
    monkeypatch.setattr(served, "_wait", answers)
    monkeypatch.setattr(served, "STOP_SECONDS", 0.1)
    settings = BenchSettings("target", {}, [], [1])
    with (
        pytest.raises(ValueError, match="does not answer"),
        served._server(tmp_path, settings, None, [[1]], 1),
    ):
        pass
    assert started[0].returncode == -signal.SIGKILL


def test_engine_arguments_become_flags():
    options = {"a_b": True, "c": False, "d": 2, "e": "f", "g": {"h": [1]}}
    found = ["--a-b", "--no-c", "--d", "2", "--e", "f", "--g", '{"h": [1]}']
    assert list(flags(options)) == found
