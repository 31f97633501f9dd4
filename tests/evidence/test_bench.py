"""`vllm-specinfer bench` measures what it says, side by side."""

import csv
import json
from collections import Counter

import numpy as np
import pytest

from vllm_specinfer import cli
from vllm_specinfer.evidence.bench import Measured, report

MAX_TOKENS = 16
PROMPTS = 6
BATCHES = (1, 3)


def rows_of(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def test_all_methods_answer_the_same_prompts_and_their_steps_are_counted(
    run_command, tmp_path
):
    options = {"out": tmp_path, "max-tokens": MAX_TOKENS, "max-prompts": PROMPTS}
    batches = ["--batches", *map(str, BATCHES)]
    shown = run_command("bench", "--ignore-eos", *batches, **options)
    assert (tmp_path / "table.md").read_text() in shown
    rows = rows_of(tmp_path / "table.csv")
    methods = ["plain", "specinfer", "draft_model", "ngram"]
    assert [(int(r["batch"]), r["method"]) for r in rows] == [
        (batch, method) for batch in BATCHES for method in methods
    ]
    for row in rows:
        # Greedy float32: every method's text is plain vLLM's.
        assert row["identical"] == row["texts"] == str(PROMPTS)
        per_step, steps = float(row["tokens per step"]), int(row["steps"])
        # Each prompt brings a token; a last step may bring up to 8 that are cut off.
        most = PROMPTS * (MAX_TOKENS - 1 + 8)
        assert PROMPTS * (MAX_TOKENS - 1) <= round(per_step * steps) <= most
        if row["method"] == "plain":
            assert per_step == 1 == float(row["ratio median"])
            assert steps == PROMPTS * (MAX_TOKENS - 1)
        if row["method"] == "draft_model":
            assert per_step > 1.3
        assert float(row["ratio 25%"]) <= float(row["ratio median"])
        assert 0 < float(row["seconds to first token"]) < 60
    measured = rows_of(tmp_path / "batches.csv")
    counts = Counter((int(r["batch"]), r["method"]) for r in measured)
    assert counts == {(b, m): PROMPTS // b for b in BATCHES for m in methods}
    assert {int(r["tokens"]) for r in measured} == {b * MAX_TOKENS for b in BATCHES}
    for name in ("speedup.png", "depths.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    about = json.loads((tmp_path / "bench.json").read_text())
    assert about["settings"]["configs"]["ngram"]["num_speculative_tokens"] == 4
    assert about["versions"]["torch"]


def measured(seconds, tokens, texts, steps):
    return Measured(np.array(tokens), np.array(seconds), texts, [0.5, 1.5], steps)


def test_ratios_are_those_of_the_same_batch(tmp_path):
    texts = [[1, 2], [3, 4]]
    plain = measured([1.0, 10.0, 4.0], [10, 10, 10], texts, {1: 30})
    quick = measured([0.5, 10.0, 1.0], [10, 10, 10], [[1, 2], [3, 5]], {1: 2, 3: 6})
    cells = {("p", t, 1): {"plain": plain, "quick": quick} for t in (0.0, 0.5)}
    # A larger batch has fewer measurements.
    large = measured([1.0], [30], texts, {1: 30})
    cells["p", 0.0, 3] = {"plain": large, "quick": large}
    table = report(tmp_path, cells)
    # Rates 20, 1, 10 over 10, 1, 2.5; the median of the ratios 2, 1, 4.
    assert (
        "| p | 0.0 | 1 | quick | 10.0 (5.5 to 15.0) | 2.00 (1.50 to 3.00) | 2.50 "
        "| 1 of 2 |" in table
    )
    assert "| p | 0.5 | 1 | quick |" in table and "| 2.50 | - |" in table
    depths = rows_of(tmp_path / "depths.csv")
    quick = [r for r in depths if r["method"] == "quick" and r["temperature"] == "0.0"]
    assert [(r["depth"], float(r["accepted"])) for r in quick] == [
        ("1", 0.75),
        ("2", 0.75),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "needs --ssm or --config; got neither"),
        (["--config", 'plain={"model": "ngram"}'], "no config may be named 'plain'"),
        (
            ["--config", 'a={"method": "ngram"}', "--config", 'b={"method": "ngram"}'],
            "one engine with method 'ngram' per process; got more: a, b",
        ),
        (["--config", 'a={"model": "ngram"}', "--batches", "0"], "at least 1; got [0]"),
        (["--config", 'a={"model": "ngram"}', "--max-tokens", "1"], "at least 2; got"),
        (["--config", 'a={"model": "ngram"}', "--batches", "9"], "at least 9 prompts"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path, arguments, sentence, capsys, monkeypatch
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": [1, 2]}\n')
    common = ["bench", "--prompts", str(file), "--out", str(tmp_path / "out")]
    assert cli.main([*common, *arguments]) == 1
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
