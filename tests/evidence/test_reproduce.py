"""`vllm-specinfer reproduce` writes tables of what the engines did."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vllm_specinfer.evidence.reproduce import steps
from vllm_specinfer.evidence.reproduce.table1 import hit_rates
from vllm_specinfer.evidence.reproduce.treeattn import Sides
from vllm_specinfer.evidence.trace import read_trace, step_line
from vllm_specinfer.tree.token_tree import ROOT

# One process for all tables: it takes long to import vLLM.
PROGRAM = "import json, sys; from vllm_specinfer import cli\n"
PROGRAM += "for a in json.load(sys.stdin): sys.argv[1:] = a; assert cli.main(a) == 0"


@pytest.fixture(scope="module")
def tables(tiny: dict[str, str], tmp_path_factory) -> dict[str, list[dict[str, str]]]:
    """The rows of all tables, from tiny models."""
    out: Path = tmp_path_factory.mktemp("tables")
    engine = ["--target", tiny["target"], "--engine", tiny["engine"]]
    answers = [*engine, "--prompts", tiny["prompts"], "--max-tokens", "12"]
    one = ["--ssm", tiny["ssm"]]
    commands = {
        # Before an engine has chosen its runner for this process and its children.
        "memory": [*engine, *one, "--nodes", "16", "--batches", "2"],
        "table1": [*answers, *one, "--most", "3", "--temperatures", "0"],
        "table2": [*answers, *one, "--widths", "1", "3", "--temperatures", "0"],
        "treeattn": ["--nodes", "8", "70", "--batches", "1", "--seconds", "0"],
    }
    subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(
            [
                ["reproduce", name, "--out", str(out / name), *arguments]
                for name, arguments in commands.items()
            ]
        ),
        check=True,
        timeout=600,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    rows = {}
    for name in commands:
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
    # Memory: the logits of the nodes at least.
    (row,) = tables["memory"]
    assert int(row["nodes"]) == 16
    assert 0 < float(row["MiB more than plain"]) < 200
    assert float(row["MiB of K/V"]) == pytest.approx(1024, rel=0.05)
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
    chosen = [c.get("ssms", c.get("model")) for c in found.values()]
    x, y = (str(tmp_path / name) for name in "xy")
    assert chosen == [[x], [x, y], x]
    for config in found.values():
        assert config["num_speculative_tokens"] == 4


def test_trees_and_paths_attend_alike():
    torch.manual_seed(0)
    sides = Sides(batch=2, nodes=70, context=128, dtype=torch.float32)
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
    tested, rates = hit_rates(read_trace(file))
    # Roots: rank 0, 1, none, 0; after accepted nodes: rank 1, none, none.
    assert tested == 7
    assert rates.tolist() == pytest.approx([2 / 7, 4 / 7])
