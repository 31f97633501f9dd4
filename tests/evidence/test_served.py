"""`vllm-specinfer bench --served` measures servers with vLLM's own client."""

import csv
import json

from vllm_specinfer.evidence.bench import BenchSettings
from vllm_specinfer.evidence.served import bench_served, flags

MAX_TOKENS = 8
PROMPTS = 6


def test_a_server_answers_all_prompts(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = BenchSettings(
        tiny["target"],
        configs={},
        prompts=[tiny["prompts"]],
        batches=[2],
        max_prompts=PROMPTS,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        engine=json.loads(tiny["engine"]),
    )
    table = bench_served(tmp_path, settings, ["bench"])
    assert table == (tmp_path / "served.md").read_text()
    with (tmp_path / "served.csv").open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["method"], row["batch"]) == ("plain", "2")
    assert float(row["tokens/s"]) > 1 == float(row["tokens/s, ratio"])
    assert float(row["ms to first token"]) > 0 < float(row["ms per token"])
    log = (tmp_path / "driver.log").read_text().splitlines()
    # The warm-up is not among them.
    generated = [line.split()[-1] for line in log if "Total generated" in line]
    assert generated == [str(PROMPTS * MAX_TOKENS)]


def test_engine_arguments_become_flags():
    options = {"a_b": True, "c": False, "d": 2, "e": "f", "g": {"h": [1]}}
    found = ["--a-b", "--no-c", "--d", "2", "--e", "f", "--g", '{"h": [1]}']
    assert list(flags(options)) == found
