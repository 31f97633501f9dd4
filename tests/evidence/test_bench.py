"""`vllm-specinfer bench` measures what it says, side by side."""

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specinfer import cli
from vllm_specinfer.evidence import bench, commands
from vllm_specinfer.evidence.bench import Traffic, choose, num_turns
from vllm_specinfer.evidence.measured import Cell, Measured, report
from vllm_specinfer.options import SSMSource

MAX_TOKENS = 16
PROMPTS = 6
BATCHES = (1, 2)
STARTS = 2


def rows_of(file):
    with open(file, newline="") as lines:
        return list(csv.DictReader(lines))


def test_all_methods_answer_the_same_prompts_and_their_steps_are_counted(
    run_command, tiny, tmp_path
):
    options = {"out": tmp_path, "max-tokens": MAX_TOKENS, "max-prompts": PROMPTS}
    options["starts"] = STARTS
    batches = ["--batches", *map(str, BATCHES)]
    # The default follows the load, and may find that no tree pays.
    static = json.dumps({"model": tiny["ssm"], "scheduler": "static"})
    options["config"] = f"specinfer={static}"
    shown = run_command("bench", "--ignore-eos", *batches, **options)
    assert (tmp_path / "table.md").read_text() in shown
    rows = rows_of(tmp_path / "table.csv")
    methods = ["plain", "specinfer", "draft_model", "ngram"]
    assert [(int(r["batch"]), r["method"]) for r in rows] == [
        (batch, method) for batch in BATCHES for method in methods
    ]
    for row in rows:
        # Greedy float32: every method's text is plain vLLM's.
        assert row["identical"] == row["texts"] == str(STARTS * PROMPTS)
        per_step, steps = float(row["tokens per step"]), int(row["steps"])
        # Each prompt brings a token; a last step may bring up to 8 that are cut off.
        most = STARTS * PROMPTS * (MAX_TOKENS - 1 + 8)
        least = STARTS * PROMPTS * (MAX_TOKENS - 1)
        assert least <= round(per_step * steps) <= most
        if row["method"] == "plain":
            assert per_step == 1 == float(row["ratio median"])
            assert steps == least
        if row["method"] == "draft_model":
            assert per_step > 1.3
        assert float(row["ratio 25%"]) <= float(row["ratio median"])
        assert 0 < float(row["seconds to first token"]) < 60
    measured = rows_of(tmp_path / "turns.csv")
    counts = Counter((int(r["batch"]), r["method"]) for r in measured)
    # One prompt at a time: all count. Two: the first two begin at once, the last two
    # end in a batch that empties.
    turns = {1: STARTS * PROMPTS, 2: STARTS * (PROMPTS // 2 - 2)}
    assert counts == {(b, m): turns[b] for b in BATCHES for m in methods}
    for row in measured:
        if row["method"] == "plain":
            # All requests run in step: each turn is that of as many whole texts.
            assert int(row["tokens"]) == int(row["batch"]) * MAX_TOKENS
    sources = rows_of(tmp_path / "sources.csv")
    assert [(int(r["batch"]), r["method"], r["source"]) for r in sources] == [
        (batch, "specinfer", "ssm0") for batch in BATCHES
    ]
    trees = [row for row in rows if row["method"] == "specinfer"]
    for row, source in zip(trees, sources, strict=True):
        per_step = 1 + float(source["accepted per step"])
        assert (
            per_step == pytest.approx(float(row["tokens per step"])) and per_step > 1.3
        )
    for name in ("speedup.png", "depths.png", "sources.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    about = json.loads((tmp_path / "bench.json").read_text())
    assert about["settings"]["configs"]["ngram"]["num_speculative_tokens"] == 4
    assert about["versions"]["torch"]


class Engine:
    """An engine core that gives every request one token per step."""

    def __init__(self, lengths):
        self.lengths, self.requests = lengths, {}
        self.most, self.least = 0, len(lengths)
        self.llm_engine, self.engine_core, self.scheduler = self, self, self

    def add_request(self, request_id, prompt, params):
        self.requests[request_id] = SimpleNamespace(num_output_tokens=0)
        self.most = max(self.most, len(self.requests))

    def get_num_unfinished_requests(self):
        return len(self.requests)

    def step(self):
        assert self.requests
        self.least, ended = min(self.least, len(self.requests)), []
        for name, request in list(self.requests.items()):
            request.num_output_tokens += 1
            if request.num_output_tokens == self.lengths[int(name)]:
                del self.requests[name]
                texts = [SimpleNamespace(token_ids=[0] * self.lengths[int(name)])]
                metrics = SimpleNamespace(queued_ts=1.0, first_token_ts=2.0)
                output = {"request_id": name, "outputs": texts, "metrics": metrics}
                ended.append(SimpleNamespace(**output))
        return ended


def test_a_turn_counts_the_tokens_of_unfinished_texts_and_keeps_the_batch_full():
    engine = Engine(lengths=[2, 9, 3, 1, 8, 2])
    engine.engine_core = SimpleNamespace(engine_core=engine)
    traffic = Traffic(engine, [[1]] * 6, [None] * 6, batch=2)
    for _ in range(num_turns(6, 2)):
        traffic.take_turn()
    # Steps 1 to 5 end texts 0 and 2, then 6 to 9 end 3 and 1; always two run. The first
    # turn does not count.
    traffic.finish()
    log = SimpleNamespace(counts=Counter({1: 3}), sources=Counter())
    result = traffic.measured(log)
    assert result.tokens.tolist() == [8]
    assert [len(text) for text in result.texts] == engine.lengths
    assert engine.most == 2


@pytest.mark.parametrize("seed", range(8))
def test_the_batch_is_full_in_every_turn(seed):
    """However many requests end in one step."""
    lengths = np.random.default_rng(seed).integers(1, 3, 200).tolist()
    engine, batch = Engine(lengths), 4
    engine.engine_core = SimpleNamespace(engine_core=engine)
    traffic = Traffic(engine, [[1]] * 200, [None] * 200, batch)
    for _ in range(num_turns(200, batch)):
        traffic.take_turn()
    assert engine.least == batch


@pytest.mark.parametrize(("batch", "max_turns"), [(1, 3), (4, 2), (4, 8)])
def test_prompts_are_chosen_for_as_many_turns(batch, max_turns):
    prompts = [[i] for i in range(40)]
    chosen = choose(prompts, batch, max_turns)
    # One turn of several requests does not count.
    assert num_turns(len(chosen), batch) - (batch > 1) == max_turns
    gaps = np.diff([i for (i,) in chosen])
    assert gaps.min() >= gaps.max() - 1
    assert 40 - chosen[-1][0] <= gaps.max() + 1
    assert choose(prompts, 4, 9) == choose(prompts, 4, 0) == prompts


def measured(seconds, tokens, texts, steps):
    times = np.array(tokens), np.array(seconds)
    return Measured(*times, texts, [0.5, 1.5], Counter(steps))


def test_ratios_are_those_of_the_same_batch(tmp_path):
    texts = [[1, 2], [3, 4]]
    plain = measured([1.0, 10.0, 4.0], [10, 10, 10], texts, {1: 30})
    quick = measured([0.5, 10.0, 1.0], [10, 10, 10], [[1, 2], [3, 5]], {1: 2, 3: 6})
    quick.sources.update({"suffix": 4, "ssm0": 8})
    cells = {Cell("p", t, 1): {"plain": plain, "quick": quick} for t in (0.0, 0.5)}
    # A larger batch has fewer measurements.
    large = measured([1.0], [30], texts, {1: 30})
    cells[Cell("p", 0.0, 3)] = {"plain": large, "quick": large}
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
    sources = rows_of(tmp_path / "sources.csv")
    of_quick = [("ssm0", 1.0), ("suffix", 0.5)]
    found = [(r["source"], float(r["accepted per step"])) for r in sources]
    assert found == of_quick * 2 and {r["method"] for r in sources} == {"quick"}


def test_a_bench_that_is_cut_off_has_its_finished_cells(monkeypatch, tmp_path):
    turns = iter(range(1, 9))

    def measure(settings, engines, prompts, title):
        for cell in settings.cells:
            turn = next(turns)
            if turn == 4:
                raise KeyboardInterrupt
            one = measured([1.0], [10 * turn], [[1]], {1: 10})
            yield cell, {name: one for name in engines}

    monkeypatch.setattr(sys, "argv", ["bench"])
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "start_method", lambda *_: None)
    monkeypatch.setattr(bench, "load_prompts", lambda settings: {})
    monkeypatch.setattr(bench, "in_a_process", lambda run, *given: run(*given))
    config = {"ours": {"method": "specinfer"}}
    settings = bench.BenchSettings("", config, ["p"], batches=[1, 2], starts=2)
    with pytest.raises(KeyboardInterrupt):
        bench.bench(tmp_path, settings)
    # Both cells of the first start, the first one of the second.
    assert [
        (r["batch"], r["method"], r["tokens"]) for r in rows_of(tmp_path / "turns.csv")
    ] == [
        (batch, method, str(tokens))
        for batch, counts in (("1", (10, 30)), ("2", (20,)))
        for method in ("plain", "ours")
        for tokens in counts
    ]
    assert json.loads((tmp_path / "bench.json").read_text())["command"] == ["bench"]


def test_the_lengths_of_answers_are_spread_evenly():
    settings = bench.BenchSettings("", {}, ["p"], max_tokens=100, range_ratio=0.5)
    lengths = settings.lengths(4)
    assert sorted(lengths) == [62, 88, 112, 138] and lengths != sorted(lengths)
    assert settings.longest == 150
    assert bench.BenchSettings("", {}, ["p"], max_tokens=100).lengths(2) == [100, 100]
    shortest = bench.BenchSettings("", {}, ["p"], max_tokens=2, range_ratio=0.95)
    assert min(shortest.lengths(100)) == 1


@pytest.mark.parametrize(
    ("architecture", "kind", "method"),
    [
        ("LlamaForCausalLM", None, "draft_model"),
        ("LlamaForCausalLMEagle3", None, "eagle3"),
        ("EagleLlamaForCausalLM", None, "eagle"),
        ("LlamaForCausalLM", "eagle3", "eagle3"),
        ("LlamaForCausalLMEagle3", "ssm", "draft_model"),
    ],
)
def test_vllm_drafts_with_a_head_by_its_own_method(
    make_llama, architecture, kind, method
):
    head = make_llama("head", architectures=[architecture])
    assert commands._vllms_method(SSMSource(head, type=kind)) == method


def test_a_head_as_the_library_speculators_writes_it_is_a_head(make_llama, tmp_path):
    """Its config names no type of model."""
    layer = json.loads((Path(make_llama("layer")) / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "a", "architectures": ["LlamaForCausalLM"]},
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert commands._vllms_method(SSMSource(str(tmp_path))) == "eagle3"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", 'a={"model": "ngram", "tree": []}'], "at least one level"),
        ([], "needs --ssm or --config; got neither"),
        (["--config", 'plain={"model": "ngram"}'], "no config may be named 'plain'"),
        (
            ["--config", 'a={"method": "ngram"}', "--config", 'b={"method": "ngram"}'],
            "one engine with method 'ngram' per process; got more: a, b",
        ),
        (["--config", 'a={"model": "ngram"}', "--batches", "9"], "at least 9 prompts"),
        (
            ["--config", 'a={"model": "ngram"}', "--range-ratio", "1"],
            "at least 0 and below 1; got 1.0",
        ),
        (
            ["--config", 'a={"model": "ngram"}', "--range-ratio", "0.5", "--served"],
            "of one length with --served; got --range-ratio 0.5",
        ),
        (
            ["--config", 'a={"model": "ngram"}', "--served"],
            "must have 4 to 1024 tokens for vLLM's bench serve with --max-tokens 128",
        ),
        (
            ["--config", 'a={"model": "ngram"}', "--served", "--max-tokens", "2040"],
            "must have 4 to 8 tokens",
        ),
        (
            ["--config", 'a={"model": "ngram"}', "--served", "--max-turns", "2"],
            "all prompts are answered with --served",
        ),
        (
            ["--config", 'a={"model": "ngram"}', "--chain", "2"],
            "--chain needs --ssm; got none",
        ),
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
