"""What is wrong on a command line is said before any work is done."""

from urllib.error import URLError

import pytest

from vllm_specinfer import cli
from vllm_specinfer.evidence import engines
from vllm_specinfer.evidence.arguments import model
from vllm_specinfer.evidence.engines import start_engine
from vllm_specinfer.evidence.reproduce import commands
from vllm_specinfer.evidence.reproduce.commands import POOL

RECORD = ["record", "--prompts", "mtbench", "--ssm", "ngram"]
BENCH = ["bench", "--prompts", "mtbench"]
TUNE = ["tune", "--out", "new", "--prompts", "mine.txt"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ([*RECORD, "--out", "FOLDER"], "must be a file; got the folder"),
        ([*RECORD, "--out", "FILE/trace"], "must be writable"),
        ([*RECORD, "--out", "new", "--temperature", "-1"], "at least 0; got -1"),
        ([*RECORD, "--out", "new", "--max-tokens", "x"], "whole number of at least 2"),
        (
            ["reproduce", "table2", "--out", "new", "--max-tokens", "1"],
            "whole number of at least 2; got 1",
        ),
        ([*RECORD, "--out", "x" * 300], "must be writable"),
        ([*BENCH, "--out", "x" * 300 + "/new"], "must be writable"),
        (["simulate", "trace", "--nodes", "-3"], "at least 1; got -3"),
        (["fit-scheduler", "trace", "--out", "FOLDER"], "must be a file"),
        ([*BENCH, "--out", "FILE"], "must be writable"),
        ([*BENCH, "--out", "new", "--config", "a={bad"], "must be a JSON object"),
        ([*BENCH, "--out", "new", "--config", "a"], "must be NAME=JSON such as"),
        ([*BENCH, "--out", "new", "--target", str(POOL)], "got the pool"),
        (
            ["fit-scheduler", "trace", "--out", "new", "--size", "-1"],
            "must be a whole number of at least 0 and at most 256; got -1",
        ),
        (
            ["fit-scheduler", "trace", "--out", "new", "--sizes", "8", "257"],
            "must be a whole number of at least 0 and at most 256; got 257",
        ),
        (["reproduce", "table1", "--out", "new", "--most", "0"], "at least 1; got 0"),
        (
            ["reproduce", "scheduler", "--out", "new", "--size", "1000"],
            "at least 0 and at most 256; got 1000",
        ),
        ([*BENCH, "--out", "new", "--batches", "1", "0"], "at least 1; got 0"),
        ([*BENCH, "--out", "new", "--starts", "0"], "at least 1; got 0"),
        ([*BENCH, "--out", "new", "--max-turns", "-1"], "at least 0; got -1"),
        ([*BENCH, "--out", "new", "--max-tokens", "1"], "at least 2; got 1"),
        (["reproduce", "tp", "--out", "new", "--batches", "0"], "at least 1; got 0"),
        (["reproduce", "tp", "--out", "new", "--starts", "0"], "at least 1; got 0"),
        (["reproduce", "memory", "--out", "new", "--nodes", "0"], "at least 1; got 0"),
        (["reproduce", "table2", "--out", "new", "--widths", "0"], "at least 1; got 0"),
        (["reproduce", "treeattn", "--out", "FILE"], "must be writable"),
        (
            [*RECORD, "--out", "new", "--target", "/nowhere"],
            "--target: no such folder: /nowhere",
        ),
        (
            ["record", "--prompts", "mtbench", "--out", "new", "--ssm", "./no"],
            "--ssm: no such folder: ./no",
        ),
        ([*BENCH, "--out", "new", "--target", "a/b/c"], "no such folder: a/b/c"),
        ([*BENCH, "--out", "new", "--ssm", "no/no/"], "no such folder: no/no/"),
        ([*TUNE, "--target", "no such"], "--target: no such folder: no such"),
        ([*TUNE, "--target", "FOLDER", "--base", "~/no/no"], "--base: no such folder"),
        (
            ["reproduce", "ssms", "--out", "new", "--pools", "FOLDER", "../no"],
            "--pools: no such folder: ../no",
        ),
        (
            ["reproduce", "table1", "--out", "new", "--ssm", "/no"],
            "--ssm: no such folder: /no",
        ),
    ],
)
def test_wrong_arguments(command, reason, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FILE").touch()
    with pytest.raises(SystemExit):
        cli.main(command)
    assert reason in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 2


def test_two_configs_of_one_name_are_refused(tmp_path, capsys) -> None:
    configs = ["a={}".format('{"model": "ngram"}'), 'a={"model": "suffix"}']
    command = [*BENCH, "--out", str(tmp_path), "--config", configs[0]]
    assert cli.main([*command, "--config", configs[1]]) == 1
    assert "must have a name of its own; got ['a', 'a']" in capsys.readouterr().err


class OfPydantic(ValueError):
    def errors(self) -> list[dict]:
        return [
            {"loc": ("max_model_len",), "msg": "Input should be a valid integer"},
            {"loc": (), "msg": "Value error"},
        ]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("it is wrong\nat length"), "it is wrong"),
        (OSError("one of: \n(1) this\n (2) that"), "one of: (1) this (2) that"),
        (URLError("no answer"), "<urlopen error no answer>"),
        (FileNotFoundError(2, "No such file", "mine"), "mine: No such file"),
        (OfPydantic(), "max_model_len: Input should be a valid integer; Value error"),
    ],
)
def test_errors_are_said_in_a_line(monkeypatch, capsys, error, sentence) -> None:
    def fails(*_) -> None:
        raise error

    monkeypatch.setattr(cli, "_check", fails)
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == f"vllm-specinfer: {sentence}\n"


@pytest.mark.parametrize("option", ["ssm", "pools"])
def test_an_installed_package_asks_for_what_it_does_not_hold(
    option, tmp_path, monkeypatch, capsys
) -> None:
    for name in ("POOL", "SHIPPED_SSM"):
        monkeypatch.setattr(commands, name, tmp_path / "examples")
    table = {"ssm": "table1", "pools": "ssms"}[option]
    with pytest.raises(SystemExit):
        cli.main(["reproduce", table, "--out", str(tmp_path)])
    sentence = f"the following arguments are required: --{option}"
    assert sentence in capsys.readouterr().err


def test_models_are_folders_or_hub_ids(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert model("~/mine") == str(tmp_path / "mine")
    for name in (str(tmp_path), "ngram", "org/a-model.v1"):
        assert model(name) == name


def test_interrupted_commands_say_so(monkeypatch, capsys) -> None:
    def interrupted(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_check", interrupted)
    assert cli.main(["check"]) == 130
    assert capsys.readouterr().err == "vllm-specinfer: interrupted\n"


@pytest.mark.parametrize(
    ("space", "engine", "size"),
    [
        ("", {}, 1 << 30),
        ("", {"kv_cache_memory_bytes": 5}, 5),
        # vLLM's to read.
        ("2", {}, None),
    ],
)
def test_the_kv_cache_has_a_gib_where_nobody_says_otherwise(
    monkeypatch, space, engine, size
) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", space)
    monkeypatch.setattr("vllm.LLM", dict)
    monkeypatch.setattr(engines, "warn_of_waits", lambda *args: None)
    started = start_engine("model", 100, 1, None, engine)
    assert started.get("kv_cache_memory_bytes") == size


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"dtyp": "float32"}, "arguments of vllm.LLM; got dtyp"),
        ({"max_model_len": 99}, "max_model_len must be at least 100"),
        ({"model": "other"}, "--engine must leave model to the command's options"),
        ({"speculative_config": {}}, "must leave speculative_config to"),
    ],
)
def test_wrong_engines_do_not_start(engine, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        start_engine("no-model", 100, 1, None, engine)
