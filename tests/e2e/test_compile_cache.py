"""Models are compiled once on a CPU, not in every start of an engine."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from vllm_specinfer.hooks import compile_cache

AOT, FOLDER = compile_cache.AOT_ENV, compile_cache.FOLDER_ENV
NAMES = compile_cache.NAMES_ENV


def generate(llm: dict) -> tuple[list[int], dict[str, int]]:
    """Start an engine; its text, and what inductor has found and compiled."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = LLM(**llm).generate([{"prompt_token_ids": [1, 2, 3]}], params)
    return output.outputs[0].token_ids, dict(counters["aot_autograd"])


def started(llm: dict, **env: str) -> tuple[list[int], dict[str, int]]:
    """`generate` in a process that imports vLLM with more of the environment."""
    context, env = multiprocessing.get_context("spawn"), {**processes.ENV, **env}
    with ProcessPoolExecutor(1, context, processes.set_environment, (env,)) as process:
        return process.submit(generate, llm).result(600)


def test_the_second_start_compiles_nothing(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0, num_hidden_layers=1)
    llm = engine.tiny(target)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    trees = {**llm, "speculative_config": {"method": "specinfer", "model": ssm}}
    env = {FOLDER: str(tmp_path / "cache")}
    first, compiled = started(trees, **env, **{NAMES: "0"})
    again, found = started(trees, **env, **{NAMES: "0"})
    assert compiled["autograd_cache_miss"] > 0
    assert found["autograd_cache_hit"] == 2  # target and SSM
    assert "autograd_cache_miss" not in found
    launchers = (tmp_path / "cache").rglob("*.main.cpp")
    assert sum("inductor_entry_cpp" in file.read_text() for file in launchers) == 2
    plain, _ = processes.call(generate, {**llm, "enforce_eager": True}, **env)
    assert first == again == plain


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {AOT: "0", NAMES: "0", FOLDER: "/cache/torch_compile_cache/inductor"}),
        ({FOLDER: "/mine"}, {AOT: "0", NAMES: "0", FOLDER: "/mine"}),
        ({NAMES: "1", FOLDER: "/mine"}, {AOT: "0", NAMES: "1", FOLDER: "/mine"}),
        ({AOT: "1"}, {AOT: "1"}),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, before, after):
    for name in (AOT, NAMES, FOLDER):
        # Set first: an absent variable that is deleted is not restored afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    compile_cache.enable()
    assert {
        name: os.environ[name] for name in (AOT, NAMES, FOLDER) if name in os.environ
    } == after
