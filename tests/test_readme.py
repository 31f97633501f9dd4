"""Every command in the documents is one that the programs understand."""

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from vllm_specinfer import cli
from vllm_specinfer.parsing import parse_options

ROOT = Path(__file__).parents[1]
DOCUMENTS = "\n".join(
    file.read_text() for file in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
)
ASSIGNMENT = re.compile(r"(\w+)=(\S*)$")


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command in the indented blocks, variables put in."""
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    for block in blocks:
        variables: dict[str, str] = {}
        pending = ""
        for line in block.splitlines():
            pending += line.strip() + "\n"
            if pending.endswith("\\\n"):
                pending = pending[:-2] + " "
                continue
            filled = string.Template(pending).substitute(variables)
            try:
                words = shlex.split(filled, comments=True)
            except ValueError:  # inside quotes that go on in the next line
                continue
            pending = ""
            if len(words) == 1 and (found := ASSIGNMENT.match(words[0])):
                variables[found[1]] = found[2]
            else:
                # The documents leave out further options so.
                yield [word for word in words if word != "..."]
        assert not pending, f"an unfinished command: {pending}"


def test_the_commands_are_found():
    text = "    a=x\n    go --b '$a/1\n      {}' \\\n        -c  # d\n    stop\n\nno\n"
    assert list(commands(text)) == [["go", "--b", "x/1\n{}", "-c"], ["stop"]]
    assert len(list(commands(DOCUMENTS))) > 25


class Parsed(Exception):
    """The arguments were understood; the program goes no further."""


@pytest.mark.parametrize("words", list(commands(DOCUMENTS)), ids=" ".join)
def test_a_program_understands_the_command(words, monkeypatch, tmp_path):
    while ASSIGNMENT.match(words[0]):  # of the environment
        words = words[1:]
    if words[:2] == ["taskset", "-c"]:
        words = words[3:]
    program, *arguments = words
    is_venv = words[:3] == ["python3", "-m", "venv"]
    if is_venv or program in ("apt-get", "pip", "printf", "vllm"):
        return  # not ours
    if program == "make":
        assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
        return
    if program == "bash":
        assert (ROOT / arguments[0]).is_file()
        return
    if arguments[:2] == ["-m", "pytest"]:
        assert all((ROOT / file).is_file() for file in arguments[2:])
        return

    parse = argparse.ArgumentParser.parse_args

    def parse_only(self, args=None, namespace=None):
        parse(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with mock.patch.dict(os.environ), pytest.raises(Parsed):
        if program == "vllm-specinfer":
            cli.main(arguments)
        assert program == "python"
        if arguments[0] == "-m":
            monkeypatch.setattr(sys, "argv", arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__")
        monkeypatch.setattr(sys, "argv", arguments)
        monkeypatch.syspath_prepend((ROOT / arguments[0]).parent)  # as python does
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")


def configs() -> list[dict]:
    """What the documents and examples give as a config of this method."""
    found = []
    python = [f.read_text() for f in ROOT.glob("examples/*.py")]
    texts = [DOCUMENTS, *(f.read_text() for f in ROOT.glob("examples/*.[ms][dh]"))]
    for text in [*texts, *python]:
        for match in re.finditer(r"\{(?=\s*\"method\":\s*\"specinfer\")", text):
            rest = text[match.start() :].replace("...", "")
            # In Python with names of variables.
            with contextlib.suppress(*[ValueError] if text in python else ()):
                found.append(json.JSONDecoder().raw_decode(rest)[0])
    return found


@pytest.mark.parametrize("config", configs(), ids=json.dumps)
def test_a_config_in_the_documents_is_one(config):
    assert parse_options(config).sources


def test_the_configs_are_found():
    assert len(configs()) > 4


def test_the_attention_benchmark_runs(monkeypatch, capsys):
    sizes = "--dtype float32 --contexts 128 --rows 4 --batches 1 --seconds 0"
    monkeypatch.setattr(sys, "argv", ["p7", *sizes.split()])
    runpy.run_path(str(ROOT / "benchmarks/cpu_attention.py"), run_name="__main__")
    assert re.search(
        r"within 1.15 of vllm: [01]/1; below sdpa", capsys.readouterr().out
    )
