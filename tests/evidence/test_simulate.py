"""A recorded trace is what the engine did, and simulated trees are what they say."""

import csv
import io
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from vllm_specinfer import cli
from vllm_specinfer.evidence.record import Recorder
from vllm_specinfer.evidence.simulate import Costs, Simulated, simulate, simulate_all
from vllm_specinfer.evidence.trace import read_trace, step_line
from vllm_specinfer.options import BestFirstTree
from vllm_specinfer.parse_trees import default_tree, parse_tree
from vllm_specinfer.tree.token_tree import ROOT

WIDTHS = (3, 2, 2, 1)
MAX_TOKENS = 24


def written_trace(file, num_steps, widths=WIDTHS, seed=0):
    """A trace of random scores, whose paths end anywhere."""
    rng = np.random.default_rng(seed)
    lines = [json.dumps({"tree": widths}) + "\n"]
    for _ in range(num_steps):
        nodes, level = [], [(ROOT, 0.0)]
        for width in widths:
            children = [
                (float(np.float32(score)), parent)
                for parent, above in level
                for score in above - np.sort(rng.exponential(1, width))
            ]
            level = [(len(nodes) + i, score) for i, (score, _) in enumerate(children)]
            nodes += children
        order = sorted(range(len(nodes)), key=lambda i: -nodes[i][0])
        place = {ROOT: ROOT, **{node: i for i, node in enumerate(order)}}
        parents = [place[nodes[i][1]] for i in order]
        path, node = [], ROOT
        while node in parents and rng.random() < 0.8:
            node = rng.choice([i for i, p in enumerate(parents) if p == node])
            path.append(int(node))
        scores = np.array([nodes[i][0] for i in order])
        lines.append(step_line(0, np.array(parents), scores, path))
    file.write_text("".join(lines))
    return read_trace(file)


@pytest.fixture(scope="module")
def recorded(run_command, tmp_path_factory):
    """A trace of an engine with tiny models."""
    out = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    tree = ",".join(map(str, WIDTHS))
    run_command("record", out=out, tree=tree, **{"max-tokens": MAX_TOKENS})
    return out


def test_a_trace_holds_every_token_of_every_answer(recorded):
    steps = [json.loads(line) for line in recorded.read_text().splitlines()[1:]]
    by_request = {}
    for step in steps:
        by_request.setdefault(step["request"], []).append(1 + sum(step["on_path"]))
    assert sorted(by_request) == list(range(12))
    for counts in by_request.values():
        # The prompt brought one; the last step may bring more than is wanted.
        assert sum(counts[:-1]) < MAX_TOKENS - 1 <= sum(counts)
    # The target went through nodes of more than one rank.
    ranks = {
        rank
        for step in steps
        for rank, on_path in zip(step["rank"], step["on_path"], strict=True)
        if on_path
    }
    assert len(ranks) > 1


def test_trees_whose_last_nodes_had_no_rows_are_counted_and_left_out():
    """K/V may run short: vLLM verifies less, and the trace is of whole trees."""
    trees = SimpleNamespace(
        parents=np.array([[ROOT, 0]]), scores=np.log(np.array([[0.5, 0.2]]))
    )
    sources = SimpleNamespace(
        start=lambda *args: None,
        propose=lambda *args: SimpleNamespace(trees=trees),
        experience=SimpleNamespace(observe=lambda *args: None),
    )
    file = io.StringIO()
    recorder = Recorder(sources, file)
    sources.start(3, SimpleNamespace(req_id="a"))
    step = SimpleNamespace(slots=np.array([3]), growing=np.array([0]))
    for accepted, num_rows in (([0, 1], 2), ([0], 1), ([], 2)):
        sources.propose(step)
        sources.experience.observe(3, accepted, num_rows)
    counts = recorder.num_steps, recorder.num_nodes, recorder.num_accepted
    assert (*counts, recorder.num_cut) == (3, 5, 3, 1)
    paths = [json.loads(line)["on_path"] for line in file.getvalue().splitlines()]
    assert [sum(path) for path in paths] == [2, 0]


def test_the_recorded_tree_brings_exactly_what_was_recorded(recorded):
    trace = read_trace(recorded)
    found = simulate(trace, "recorded", trace.tree, trace.tree.num_nodes)
    assert found.tokens_per_step == trace.tokens_per_step > 1.5
    assert found.accepted.tolist() == trace.on_path.sum(axis=1).tolist()
    assert (found.nodes == trace.tree.num_nodes).all()
    assert (found.levels == len(WIDTHS)).all()


def test_the_command_writes_the_same_numbers_everywhere(recorded, tmp_path, capsys):
    costs = tmp_path / "costs.csv"
    costs.write_text("rows,seconds\n1,1\n100,2\n")
    arguments = ["simulate", recorded, "--costs", costs, "--out", tmp_path]
    arguments += ["--level-seconds", 0.1, "--batch", 1]
    assert cli.main([str(a) for a in arguments]) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "simulation.md").read_text() in shown
    rows = (tmp_path / "simulation.csv").read_text().splitlines()
    tokens = float(rows[1].split(",")[-2])
    assert rows[1].startswith('"3,2,2,1",33.0,4.0,')
    assert tokens == read_trace(recorded).tokens_per_step
    assert f"| 3,2,2,1 | 33.00 | 4.00 | {tokens:.2f} |" in shown
    assert len(rows) > 10
    assert (tmp_path / "simulation.png").stat().st_size > 10_000


def test_an_expansion_is_the_first_ranks_of_each_level(tmp_path):
    trace = written_trace(tmp_path / "trace.jsonl", 60)
    lines = (tmp_path / "trace.jsonl").read_text().splitlines()[1:]
    for widths in itertools.product((1, 2, 3), (1, 2), (1, 2)):
        tree = parse_tree(list(widths))
        found = simulate(trace, "", tree, tree.num_nodes)
        assert set(found.nodes) == {tree.num_nodes}
        for step, accepted in zip(map(json.loads, lines), found.accepted, strict=True):
            path = [i for i, on_path in enumerate(step["on_path"]) if on_path]
            inside = [
                step["depth"][i] <= 3 and step["rank"][i] < widths[step["depth"][i] - 1]
                for i in path
            ]
            assert accepted == len(list(itertools.takewhile(bool, inside)))


def test_a_best_first_tree_without_limits_is_the_likeliest_nodes(tmp_path):
    trace = written_trace(tmp_path / "trace.jsonl", 60)
    for n in (1, 3, 8, 20):
        found = simulate(trace, "", BestFirstTree(9, 99, 0.0), n)
        # Recorded nodes are stored from the likeliest down.
        assert found.accepted.tolist() == trace.on_path[:, :n].sum(axis=1).tolist()
    likely = (trace.scores[:, :20] >= np.log(0.05)).sum(axis=1)
    found = simulate(trace, "", BestFirstTree(9, 99, 0.05), 20)
    assert found.nodes.tolist() == likely.tolist()
    assert (likely < 20).any()
    one = simulate(trace, "", default_tree(1), 1)
    assert (one.nodes <= 1).all() and (one.levels == 1).all()


def test_a_best_first_tree_spends_nothing_on_a_hopeless_step(tmp_path):
    file = tmp_path / "trace.jsonl"
    good = step_line(0, np.array([ROOT, 0, ROOT]), np.log([0.9, 0.8, 0.1]), [0, 1])
    bad = step_line(0, np.array([ROOT, ROOT, 0]), np.log([0.04, 0.03, 0.02]), [0, 2])
    file.write_text('{"tree": [2, 1]}\n' + good + bad)
    found = simulate(read_trace(file), "", BestFirstTree(2, 2, 0.05), 2)
    assert found.accepted.tolist() == [2, 0]
    assert found.nodes.tolist() == [2, 0]
    assert found.levels.tolist() == [2, 1]


def test_a_node_may_have_more_children_than_one_source_gives(tmp_path):
    file = tmp_path / "trace.jsonl"
    scores = np.log([0.5, 0.3, 0.1])
    file.write_text('{"tree": [2]}\n' + step_line(0, np.full(3, ROOT), scores, [2]))
    trace = read_trace(file)
    assert trace.children[0, 0].tolist() == [0, 1, 2]
    assert simulate(trace, "", BestFirstTree(1, 3, 0.0), 3).accepted.tolist() == [1]
    assert simulate(trace, "", trace.tree, 2).accepted.tolist() == [0]


def test_costs_are_those_of_the_rows_and_levels_of_the_whole_batch():
    rows, seconds = np.array([1.0, 5.0, 9.0]), np.array([10.0, 20.0, 60.0])
    nodes, levels = np.array([1, 3]), np.array([1, 2])
    one = Simulated("", np.array([1, 2]), nodes, levels)
    # 2 rows: 12.5 s, 4 rows: 17.5 s; each level 1 s.
    expected = 2.5 * 10 / np.mean([12.5 + 1, 17.5 + 2])
    assert Costs(rows, seconds, 1.0).over_plain(one) == pytest.approx(expected)
    expected = 2.5 * 12.5 / np.mean([17.5, 50.0])
    assert Costs(rows, seconds, batch=2).over_plain(one) == pytest.approx(expected)
    with pytest.raises(ValueError, match="from 3 to 12 rows; got 1 to 9"):
        Costs(rows, seconds, batch=3).over_plain(one)


def test_costs_are_measured_as_far_as_the_trees_go(run_command, tmp_path, capsys):
    out, costs = tmp_path / "trace.jsonl", tmp_path / "costs.csv"
    options = {"max-tokens": 4, "max-prompts": 2, "costs-out": costs}
    said = run_command("record", out=out, tree="8,8", **options)
    with costs.open(newline="") as file:
        found = {
            int(row["rows"]): float(row["seconds"]) for row in csv.DictReader(file)
        }
    # The recorded tree has 72 nodes.
    assert list(found) == [1, 2, 4, 8, 16, 32, 64, 73] and min(found.values()) > 0
    program, *arguments = said.splitlines()[-1].split()
    assert program == "vllm-specinfer" and cli.main(arguments) == 0
    assert "over plain" in capsys.readouterr().out


def test_what_was_not_recorded_is_refused(tmp_path, capsys):
    file = tmp_path / "trace.jsonl"
    trace = written_trace(file, 2)
    for text in ("4", "1,1,1,1,1"):
        with pytest.raises(ValueError, match=r"must fit in the recorded one, \[3, 2"):
            simulate_all(trace, [text], [])
    costs = tmp_path / "costs.csv"
    costs.write_text("rows\n1\n")
    lines = file.read_text().splitlines(keepends=True)
    damaged = tmp_path / "damaged.jsonl"
    for content, options, sentence in (
        ("{}\n", [], "must be a trace"),
        (lines[0], [], "at least one step; got none"),
        (lines[0] + lines[1][:50], [], "line 2 must be JSON"),
        (lines[0] + '{"depth": [1]}\n', [], "line 2 must have as many numbers"),
        (lines[0] + lines[1].replace("[", "[null, "), [], "must have as many numbers"),
        (lines[0] + "[" * 100_000, [], "line 2 must be JSON"),
        ('{"tree": 3}\n', [], "tree must be"),
        ("", ["--costs", str(costs)], "--costs and --level-seconds need each other"),
        ("", ["--level-seconds", "1"], "--costs and --level-seconds need each other"),
        ("", ["--batch", "2"], "--batch needs --costs; got none"),
        ('{"tree": {"max_depth": 2}}\n', [], "must name an expansion"),
        (
            "".join(lines),
            ["--costs", str(costs), "--level-seconds", "0"],
            "must begin with the line rows,seconds",
        ),
    ):
        damaged.write_text(content)
        assert cli.main(["simulate", str(damaged), *options]) == 1
        assert sentence in capsys.readouterr().err
