"""`vllm-specinfer reproduce` writes tables of what the engines did."""

import csv
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM
from vllm.platforms import current_platform

from tests import processes
from tests.e2e.engine import KV_BYTES
from tests.e2e.models import VOCAB, tiny_llama
from vllm_specinfer import cli
from vllm_specinfer.evidence.bench import BenchSettings
from vllm_specinfer.evidence.measured import Measured
from vllm_specinfer.evidence.record import Answers, record
from vllm_specinfer.evidence.reproduce import (
    memory,
    regimes,
    scheduler,
    steps,
    table1,
    treeattn,
)
from vllm_specinfer.evidence.reproduce.heads import write_padded
from vllm_specinfer.evidence.simulate import Costs
from vllm_specinfer.evidence.trace import read_trace, step_line
from vllm_specinfer.tree.token_tree import ROOT


@pytest.fixture(scope="module")
def tables(tiny: dict[str, str], tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    """The rows of all tables, from tiny models.

    Without `tp`, which starts six processes: `test_tensor_parallel.py` measures ranks.
    """
    out: Path = tmp_path_factory.mktemp("tables")
    engine = ["--target", tiny["target"], "--engine", tiny["engine"]]
    answers = [*engine, "--prompts", tiny["prompts"], "--max-tokens", "12"]
    one = ["--ssm", tiny["ssm"]]
    pool = out / "pool"
    pool.mkdir()
    shutil.copytree(tiny["ssm"], pool / "ssm")
    (pool / "manifest.json").write_text('{"ssms": [{"model": "ssm"}]}')
    commands = {
        "memory": [*engine, *one, "--nodes", "16", "--batches", "2"],
        "table1": [*answers, *one, "--most", "3", "--temperatures", "0"],
        "table2": [*answers, *one, "--widths", "1", "3", "--temperatures", "0"],
        "table3": [*answers, *one, "--rules", "mss", "--temperatures", "0.7"],
        "ssms": [*answers, "--pools", str(pool), "--temperatures", "0"],
        "scheduler": [*answers, *one, "--tree", "3,2,1"],
        "treeattn": ["--nodes", "8", "70", "--batches", "1", "--seconds", "0"],
    }
    rows = {}
    for name, arguments in commands.items():
        arguments = ["reproduce", name, "--out", out / name, *arguments]
        processes.run(cli.main, arguments, out / "output")
        with (out / name / f"{name}.csv").open(newline="") as lines:
            rows[name] = list(csv.DictReader(lines))
        shown = (out / name / f"{name}.md").read_text().splitlines()
        assert len(shown) == 2 + len(rows[name])
        assert (out / name / f"{name}.png").stat().st_size > 10_000
    return rows


# One test: beside other processes, each test might make all tables again.
def test_the_tables_hold_what_the_engines_did(tables):
    # Hit rates rise with k, more children bring more tokens.
    rates = [float(row["hit rate"]) for row in tables["table1"]]
    assert 0.3 < rates[0] < rates[2] < 1 and rates == sorted(rates)
    narrow, wide = (float(row["tokens per step"]) for row in tables["table2"])
    assert 1.3 < narrow < wide
    nodes = [float(row["nodes per step"]) for row in tables["table2"]]
    assert nodes == [8, 2 + 6 * 3]
    assert [row["rule"] for row in tables["table3"]] == ["mss"]
    numbers = [row["SSMs"] for row in tables["ssms"]]
    assert numbers == ["pool: 1", "pool: 1, wider"]
    for row in tables["table3"] + tables["ssms"]:
        assert float(row["tokens per step"]) > 1.3
    schedulers = {row["scheduler"]: row for row in tables["scheduler"]}
    static, *engines, oracle = schedulers
    assert engines == ["auto", "learned, online", "learned, fitted"]
    assert {row["prompts"] for row in tables["scheduler"]} == {"prompts"}
    over_plain = {n: float(r["tokens/s over plain"]) for n, r in schedulers.items()}
    for name, row in schedulers.items():
        for compared, key in (
            (static, "over best static"),
            (oracle, "of the oracle's"),
        ):
            expected = over_plain[name] / over_plain[compared]
            assert float(row[key]) == pytest.approx(expected)
    assert max(over_plain.values()) == over_plain[oracle] > 1
    fitted = schedulers["learned, fitted"]
    assert float(fitted["predicted length"]) > 0 < float(fitted["actual length"])
    # Memory: plain vLLM multiplies with oneDNN, which holds some of its own.
    (row,) = tables["memory"]
    assert int(row["nodes"]) == 16
    assert -32 < float(row["MiB more than plain"]) < 200
    assert float(row["MiB of K/V"]) == pytest.approx(KV_BYTES >> 20, rel=0.05)
    # Each path has K and V of its own.
    small, large = tables["treeattn"]
    # 9 rows below each other in pairs: leaves at depth 2, 2, 2, 3, 3.
    assert (small["paths"], small["nodes"]) == ("5", "8")
    per_row = float(small["tree, KiB"]) / 9
    assert float(small["paths, KiB"]) == per_row * (3 * 3 + 2 * 4)
    assert float(large["tree, us"]) > 0 and float(large["paths, us"]) > 0


def test_rules_and_numbers_of_ssms_become_configs(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "measure", lambda answers, label, configs: configs)
    found = steps.table3(None, "a", ["naive", "mss"], nodes=4)
    assert [c["verification"] for c in found.values()] == ["naive", "mss"] == [*found]
    for name in "xy":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({}, tmp_path / name / "model.safetensors")
    pool = {"ssms": [{"model": "x"}, {"model": "y"}]}
    (tmp_path / "manifest.json").write_text(json.dumps(pool))
    found = steps.ssms(None, [str(tmp_path)], nodes=4)
    chosen = [c["ssms"] for c in found.values()]
    x, y = ({"model": str(tmp_path / name)} for name in "xy")
    assert chosen == [[x], [x, y], [x]]
    for config in found.values():
        assert config["num_speculative_tokens"] == 4


def test_what_would_be_refused_after_hours_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("one")
    never = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr(scheduler, "record", never)
    monkeypatch.setattr(table1, "record", never)
    monkeypatch.setattr(scheduler.assets, "prompt_ids", lambda *args: 3 * [[1]])
    answers = Answers("", "prompts.txt", [0.0], 0, 4, {})
    few_rows = Costs(np.array([1.0, 8.0]), np.array([1.0, 2.0]))
    for costs, sentence in (
        (scheduler.USUAL_COSTS, "must hold at least 4 prompts.* got 3"),
        (few_rows, "must go from 1 to 9 rows; got 1 to 8"),
    ):
        with pytest.raises(ValueError, match=sentence):
            scheduler.scheduler([answers], "", "1", 0, costs, 8, tmp_path)
    with pytest.raises(ValueError, match="one SSM and nothing beside it; got suffix"):
        table1.table1(answers, "suffix", 5, tmp_path)
    with pytest.raises(ValueError, match="pools must have distinct names; got x, x"):
        steps.ssms(answers, ["a/x", "b/x"], 8)
    ranks = {"tensor_parallel_size": 2}
    two = replace(answers, engine=ranks)
    for call in (
        lambda: record(tmp_path / "new", two, "", "1", 0.0),
        lambda: next(memory.memory("", "", [1], [1], ranks)),
    ):
        with pytest.raises(ValueError, match="tensor_parallel_size must be 1 .* got 2"):
            call()
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    for call in (
        lambda: next(memory.memory("", "", [1], [1], {})),
        lambda: next(treeattn.treeattn([1], [1], 16, torch.float32, 1)),
    ):
        with pytest.raises(ValueError, match="must run on a CPU; got"):
            call()


def test_engines_of_a_regime_run_alone_and_in_turn(tmp_path, monkeypatch):
    started = []

    def alone(measure, settings, prompts, name, title):
        started.append(name)
        # Each start twice as fast as the one before; trees 3 times as fast as plain.
        rate = 2.0 ** ((len(started) - 1) // 2) * (3 if name == "specinfer" else 1)
        texts = [[1, 2]] if len(started) < 4 else [[1, 3]]
        steps = Counter({3: 2} if name == "specinfer" else {1: 6})
        one = Measured(np.array([8]), np.array([8 / rate]), texts, [0.5], steps)
        return {("prompts", 0.0, 1): {name: one}}

    monkeypatch.setattr(regimes, "in_a_process", alone)
    monkeypatch.setattr(regimes, "load_prompts", lambda settings: {})
    configs = {"specinfer": {"method": "specinfer", "model": "ngram"}}
    settings = BenchSettings("target", configs, ["prompts"], starts=2)
    ((first,), (row,)) = regimes.compare(tmp_path, settings)
    assert (first["plain tokens/s"], first["ratio"]) == (1, 3)
    assert started == ["plain", "specinfer"] * 2
    assert (row["plain tokens/s"], row["specinfer tokens/s"]) == (1.5, 4.5)
    assert row["25%"] == row["ratio"] == row["75%"] == 3
    assert row["tokens per step"] == 3
    assert (row["identical"], row["texts"]) == (1, 2)
    assert json.loads((tmp_path / "bench.json").read_text())["settings"]["starts"] == 2


def test_trees_and_paths_attend_alike():
    torch.manual_seed(0)
    sides = treeattn.Sides(batch=2, nodes=70, context=128, dtype=torch.float32)
    sides.tree()
    sides.paths()
    expected = sides.tree_out[sides.path_rows]
    torch.testing.assert_close(sides.path_out, expected, rtol=1e-4, atol=1e-5)


def test_hit_rates_count_every_position_that_was_tested(tmp_path):
    file = tmp_path / "trace.jsonl"
    # Two children below the root, two below each of them, likeliest first.
    parents = np.array([ROOT, ROOT, 0, 0, 1, 1])
    scores = -np.arange(1.0, 7.0)
    paths = [[0, 3], [1], [], [0]]
    lines = [step_line(0, parents, scores, path) for path in paths]
    file.write_text('{"tree": [2, 2]}\n' + "".join(lines))
    tested, rates = table1.hit_rates(read_trace(file))
    # Roots: rank 0, 1, none, 0; after accepted nodes: rank 1, none, none.
    assert tested == 7
    assert rates.tolist() == pytest.approx([2 / 7, 4 / 7])


def test_heads_of_zeros_change_nothing(tmp_path):
    sizes = {"hidden_size": 144, "head_dim": 16}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3}
    target = Path(tiny_llama(tmp_path / "target", seed=0, **sizes))
    write_padded(target, tmp_path / "padded", ranks=2)
    before, after = (
        LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (target, tmp_path / "padded")
    )
    config = after.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (12, 4)
    ids = torch.arange(40)[None] % VOCAB
    with torch.inference_mode():
        torch.testing.assert_close(after(ids).logits, before(ids).logits)


@pytest.fixture
def asked(monkeypatch):
    """What `tp` and `offload` would compare; answers the rows of a table."""
    found = []

    def compare(out, settings):
        found.append(settings)
        yield [{"temperature": 0.0, "batch": b, "ratio": 1.0} for b in (1, 4)]

    monkeypatch.setattr(regimes, "compare", compare)
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        yield found


def reproduce(*arguments):
    return cli.main(["reproduce", *map(str, arguments), "--target", "x"])


def test_two_ranks_share_the_cores(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 3})
    assert reproduce("tp", "--out", tmp_path, "--engine", '{"dtype": "float32"}') == 0
    assert os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "0,2|3"
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert asked[0].engine == {**engine, "dtype": "float32"}
    assert (tmp_path / "tp.png").stat().st_size > 10_000
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert reproduce("tp", "--out", tmp_path) == 1
    assert "tp must have at least 2 cores; got 1" in capsys.readouterr().err


def test_what_is_measured_before_an_error_is_written(tmp_path, monkeypatch, capsys):
    def fails(*args):
        yield [{"batch": 1, "nodes": 8, "MiB more than plain": 2.0}]
        raise ValueError("the next engine does not start")

    monkeypatch.setattr(memory, "memory", fails)
    assert reproduce("memory", "--out", tmp_path) == 1
    assert "the next engine does not start" in capsys.readouterr().err
    assert "| 1 | 8 | 2.000 |" in (tmp_path / "memory.md").read_text()


def test_weights_are_offloaded_from_a_gpu_only(asked, tmp_path, monkeypatch, capsys):
    from vllm.platforms import current_platform

    assert reproduce("offload", "--out", tmp_path) == 1
    sentence = "vllm-specinfer: offload must run on a CUDA device, "
    assert capsys.readouterr().err.splitlines()[-1].startswith(sentence)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    assert reproduce("offload", "--out", tmp_path, "--gib", "0.1") == 0
    assert [settings.engine for settings in asked] == [{"cpu_offload_gb": 0.1}]
