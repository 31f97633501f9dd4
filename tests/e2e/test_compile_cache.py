"""Models are compiled once on a CPU, not in every start of an engine."""

import os

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from vllm_specinfer.hooks import compile_cache

AOT, FOLDER = compile_cache.AOT_ENV, compile_cache.FOLDER_ENV


def generate(llm: dict) -> tuple[list[int], dict[str, int]]:
    """Start an engine; its text, and what inductor has found and compiled."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    (output,) = LLM(**llm).generate([{"prompt_token_ids": [1, 2, 3]}], params)
    return output.outputs[0].token_ids, dict(counters["aot_autograd"])


def test_the_second_start_compiles_nothing(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0)
    llm = engine.tiny(target)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    trees = {**llm, "speculative_config": {"method": "specinfer", "model": ssm}}
    env = {FOLDER: str(tmp_path / "cache")}
    first, compiled = processes.call(generate, trees, **env)
    again, found = processes.call(generate, trees, **env)
    assert compiled["autograd_cache_miss"] > 0
    assert found["autograd_cache_hit"] == 2  # target and SSM
    assert "autograd_cache_miss" not in found
    plain, _ = processes.call(generate, {**llm, "enforce_eager": True}, **env)
    assert first == again == plain


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {AOT: "0", FOLDER: "/cache/torch_compile_cache/inductor"}),
        ({FOLDER: "/mine"}, {AOT: "0", FOLDER: "/mine"}),
        ({AOT: "1"}, {AOT: "1"}),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, before, after):
    for name in (AOT, FOLDER):
        # Set first: an absent variable that is deleted is not restored afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    compile_cache.enable()
    assert {
        name: os.environ[name] for name in (AOT, FOLDER) if name in os.environ
    } == after
