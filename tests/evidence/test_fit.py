"""The learned scheduler's fit to traces, and the comparison of schedulers on them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specinfer import cli
from vllm_specinfer.drafting.experience import Experience
from vllm_specinfer.evidence.fit import (
    Nodes,
    fit,
    held_out_steps,
    nodes_of,
    online,
    quality,
)
from vllm_specinfer.evidence.replay import compare, oracle, replay
from vllm_specinfer.evidence.simulate import Costs
from vllm_specinfer.evidence.trace import read_trace, step_line
from vllm_specinfer.scheduling.predictor import (
    FEATURES,
    OWN,
    RECENT,
    TEMPERATURE,
    Predictor,
    read_predictor,
)
from vllm_specinfer.tree.token_tree import ROOT

WIDTHS = (2, 1)
PARENTS = np.array([ROOT, 0, ROOT, 2])
COSTS = Costs(np.array([1.0, 9.0]), np.array([1.0, 1.4]), 0.05)


def lines_of(num_requests, num_steps, seed=0):
    """Steps of requests in turn; odd requests follow the likeliest path, even hardly.

    The source finds all of them equally likely.
    """
    rng = np.random.default_rng(seed)
    lines = [json.dumps({"tree": WIDTHS, "temperature": 0.7}) + "\n"]
    for s in range(num_steps):
        request = s % num_requests
        best = rng.uniform(0.4, 0.6)
        chances = np.array([best, 0.9 * best, 0.3, 0.2])
        right = 0.95 if request % 2 else 0.1
        path = [0, 1] if rng.random() < right else [2, 3] if rng.random() < 0.3 else []
        lines.append(step_line(request, PARENTS, np.log(chances), path))
    return lines


def trace_of(tmp_path, lines):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(lines))
    return read_trace(file)


def test_samples_are_the_tested_nodes_as_a_predictor_sees_them(tmp_path):
    steps = [(4, [0, 1]), (4, []), (4, [2]), (5, [])]
    chances = np.log([0.5, 0.4, 0.3, 0.15])
    lines = [step_line(r, PARENTS, chances, path) for r, path in steps]
    nodes = nodes_of(
        trace_of(tmp_path, ['{"tree": [2, 1], "temperature": 0.7}\n', *lines])
    )
    tested = [[1, 1, 1, 0], [1, 0, 1, 0], [1, 0, 1, 1], [1, 0, 1, 0]]
    assert nodes.tested.tolist() == np.array(tested, bool).tolist()
    right = [[1, 1, 0, 0], [0] * 4, [0, 0, 1, 0], [0] * 4]
    assert nodes.right.tolist() == np.array(right, bool).tolist()
    own, above = np.log([0.5, 0.8, 0.3, 0.5]), np.log([1, 0.5, 1, 0.3])
    # Guesses: none; two right; one of them wrong; the last two wrong.
    second = (0.9 * 2 + 1) / (0.9 * 2 + 3)
    recent = [0.5, 3 / 4, second, 0.5]
    for s in range(4):
        columns = own, above, [0, 0, 1, 0], [1, 2, 1, 2], [0.7] * 4, [recent[s]] * 4
        found = nodes.features[s].T
        np.testing.assert_allclose(found, np.array(columns), atol=1e-6)
    # Chances of paths are products: the expected length is their sum.
    lengths = nodes.path_chances(nodes.features[..., OWN]).sum(axis=1)
    assert lengths == pytest.approx([1.35] * 4)


def test_the_engine_learns_from_the_same_samples(tmp_path, monkeypatch):
    """What sources pass on for learning is what is fitted offline."""
    trace = trace_of(tmp_path, lines_of(4, 80))
    nodes = nodes_of(trace)
    steps, seen = [], []
    observe = Experience.observe

    def counted(self, slot, *args):
        steps.append(slot)
        return observe(self, slot, *args)

    def recorded(self, slot, features, right):
        seen.append((len(steps) - 1, slot, features, right))

    monkeypatch.setattr(Experience, "observe", counted)
    monkeypatch.setattr(Predictor, "observe", recorded)
    replay(trace, "", Predictor(), Costs(*np.ones((2, 2))), 4)
    assert len(steps) == 80
    whole = 0
    for s, slot, features, right in seen:
        assert slot == trace.requests[s]
        if len(features) == nodes.tested[s].sum():  # a whole tree
            whole += 1
            order = np.lexsort(features.T[:4])
            expected = nodes.features[s, nodes.tested[s]]
            expected_order = np.lexsort(expected.T[:4])
            columns = [i for i in range(len(FEATURES)) if i != RECENT]
            np.testing.assert_allclose(
                features[order][:, columns],
                expected[expected_order][:, columns],
                atol=1e-5,
            )
            expected_right = nodes.right[s, nodes.tested[s]][expected_order]
            assert right[order].tolist() == expected_right.tolist()
    assert whole > 70


def test_a_fit_finds_what_one_number_cannot(tmp_path):
    trace = trace_of(tmp_path, lines_of(8, 1600))
    nodes = nodes_of(trace)
    held = np.arange(1600) >= 1200
    train, test = nodes.only(~held), nodes.only(held)
    own = quality("", test.features[..., OWN], test)
    one_number = quality("", online(nodes, None)[held], test)
    learned = quality("", online(nodes, Predictor())[held], test)
    fitted = quality("", fit(*train.samples).corrected(test.features), test)
    blind = fit(*train.without(RECENT).samples)
    blind = quality("", blind.corrected(test.without(RECENT).features), test)
    assert max(fitted["loss"], learned["loss"]) < 0.85 * one_number["loss"]
    assert fitted["loss"] < 0.8 * min(own["loss"], blind["loss"])
    assert fitted["length error"] < 0.5 * one_number["length error"]
    assert fitted["correlation"] > 0.5 > blind["correlation"]
    lengths = fitted["predicted length"], fitted["actual length"]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)


def test_each_fourth_of_the_prompts_that_have_steps_is_held_out():
    requests = np.array([4, 0, 1, 5, 2, 5, 8, 9, 11])
    held_out = held_out_steps(SimpleNamespace(requests=requests))
    assert requests[held_out].tolist() == [4, 11]


def test_the_table_says_how_wrong_chances_are():
    features = np.zeros((40, 2, len(FEATURES)))
    right = np.arange(80).reshape(40, 2) % 4 == 0
    parents = np.full((40, 2), ROOT)
    nodes = Nodes(features, parents, np.ones((40, 2), bool), right)
    row = quality("", np.log([[0.5, 0.5], [0.3, 0.5]] * 20), nodes)
    assert row["loss"] == pytest.approx((3 * np.log(2) - np.log(0.7)) / 4)
    assert row["calibration error"] == pytest.approx(0.25, abs=0.1)
    assert row["predicted length"] == pytest.approx(0.9) and row["actual length"] == 0.5


def test_schedulers_on_a_trace_that_only_recent_guesses_explain(tmp_path):
    trace = trace_of(tmp_path, lines_of(8, 1600))
    held = trace.requests % 4 >= 2  # good and bad ones
    train = nodes_of(trace).only(~held)
    predictor = fit(*train.samples)
    before = predictor.learned()
    costs = Costs(np.array([1.0, 9.0]), np.array([1.0, 2.6]), 0.02)
    rows = {r["scheduler"]: r for r in compare(trace, held, predictor, costs, 4)}
    assert predictor.learned() == before
    best, auto, from_nothing, learned, oracle_row = rows.values()
    rate = "tokens/s over plain"
    assert [*rows][0].startswith("static, ") and best[rate] >= 1
    assert min(learned[rate], from_nothing[rate]) > 1.02 * auto[rate]
    assert oracle_row[rate] > max(row[rate] for row in [*rows.values()][:-1])
    lengths = learned["predicted length"], learned["actual length"]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.15)
    assert 1 + learned["actual length"] == pytest.approx(learned["tokens per step"])


def test_a_replay_takes_what_is_on_the_path_and_pays_for_all(tmp_path):
    trace = trace_of(tmp_path, lines_of(4, 40))
    found, expected = replay(trace, "auto", None, COSTS, 4)
    # The first steps go without trees now and then, to learn what that costs.
    plain = found.nodes == 0
    assert 0 < plain.sum() < 10
    assert (found.levels[plain] == 0).all() and (expected[plain] == 0).all()
    whole = found.nodes == 4
    assert whole.sum() > 25
    assert (found.accepted[whole] == trace.on_path.sum(axis=1)[whole]).all()
    assert (found.levels[whole] == 2).all()


def test_the_oracle_drafts_what_pays_and_no_more(tmp_path):
    trace = trace_of(tmp_path, lines_of(4, 10))
    lengths = trace.on_path.sum(axis=1)
    assert set(lengths) == {0, 2}
    # One node is cheap, a second one is not: none, one or all of the path.
    for seconds, expected in (
        ([1.0, 1.1, 1.2], lengths),
        ([1.0, 1.1, 4.0], np.minimum(lengths, 1)),
        ([1.0, 4.0, 8.0], 0 * lengths),
    ):
        costs = Costs(np.array([1.0, 2.0, 3.0]), np.array(seconds))
        found = oracle(trace, costs, 8)
        assert found.accepted.tolist() == expected.tolist()
        assert found.nodes.tolist() == expected.tolist()
    assert oracle(trace, COSTS, 1).nodes.max() == 1


def test_the_command_fits_without_a_look_at_held_out_prompts(tmp_path, capsys):
    lines = lines_of(8, 400)
    costs = tmp_path / "costs.csv"
    costs.write_text("rows,seconds\n1,1\n9,1.4\n")

    def run(name, lines):
        trace = trace_of(tmp_path, lines)
        out = tmp_path / name / "predictor.json"
        arguments = ["fit-scheduler", tmp_path / "trace.jsonl", "--out", out]
        arguments += ["--sizes", 0, "--costs", costs, "--nodes", 4]
        arguments += ["--level-seconds", 0.1]
        assert cli.main([str(a) for a in arguments]) == 0
        return trace, out

    trace, out = run("one", lines)
    shown = capsys.readouterr().out
    table = out.with_suffix(".md").read_text()
    assert table in shown and "| 0 hidden, fitted | " in table
    assert "| trace | learned, fitted | " in table and "| trace | oracle | " in table
    without = {name for name in FEATURES if f"without {name} |" in table}
    assert without == set(FEATURES) - {FEATURES[TEMPERATURE]}
    losses = out.with_suffix(".csv").read_text().splitlines()
    assert losses[0].startswith("chances,loss,calibration error,predicted length,")
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert len(out.with_suffix(".schedulers.csv").read_text().splitlines()) == 6
    fitted = read_predictor(out).learned()
    # Other texts in held-out prompts: other tables, the same predictor.
    turned = [
        step_line(3, PARENTS, np.log([0.5, 0.4, 0.3, 0.2]), [2, 3])
        if request == 3
        else line
        for line, request in zip(lines[1:], trace.requests.tolist(), strict=True)
    ]
    _, other = run("other", [lines[0], *turned])
    assert read_predictor(other).learned() == fitted
    assert other.with_suffix(".md").read_text() != table
    _, third = run("third", [*lines[:60], *lines[80:]])
    assert read_predictor(third).learned() != fitted


@pytest.mark.parametrize(
    ("trace", "out"),
    [("a.csv", "a.json"), ("a.schedulers.csv", "a.x"), ("a.json", "b.md"), ("a", "a")],
)
def test_nothing_that_was_given_is_written_over(trace, out, tmp_path, capsys):
    (tmp_path / trace).write_text("mine")
    (tmp_path / "costs.csv").write_text("rows,seconds\n1,1\n")
    arguments = ["fit-scheduler", tmp_path / trace, "--out", tmp_path / out]
    assert cli.main([str(a) for a in arguments]) == 1
    assert "must leave what is given alone" in capsys.readouterr().err
    arguments = ["fit-scheduler", tmp_path / "t", "--out", tmp_path / "costs.json"]
    costs = ["--costs", tmp_path / "costs.csv"]
    assert cli.main([str(a) for a in (*arguments, *costs)]) == 1
    assert "must leave what is given alone" in capsys.readouterr().err
    assert (tmp_path / trace).read_text() == "mine"


def test_traces_that_cannot_be_fitted_are_refused(tmp_path, capsys):
    trace_of(tmp_path, lines_of(3, 12))
    other = tmp_path / "other.jsonl"
    line = step_line(0, np.array([ROOT]), np.log([0.5]), [0])
    lines = [line.replace('"request": 0', f'"request": {r}') for r in range(4)]
    other.write_text("".join(['{"tree": [1]}\n', *lines]))
    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(lines_of(4, 12)))
    for traces, options, sentence in (
        ([tmp_path / "trace.jsonl"], [], "must hold at least 4 prompts"),
        ([whole, other], [], "must be of one tree; got [2, 1] and [1]"),
        ([whole], ["--nodes", 4], "--nodes needs --costs; got none"),
    ):
        arguments = ["fit-scheduler", *traces, "--out", tmp_path / "x.json", *options]
        assert cli.main([str(a) for a in arguments]) == 1
        assert sentence in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
