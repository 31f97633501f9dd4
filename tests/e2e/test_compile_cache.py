"""Models are compiled once on a CPU, not in every start of an engine."""

import os
from unittest import mock

import pytest
import torch
import vllm

from tests import processes
from tests.e2e import engine
from tests.e2e.models import (
    noisy_copy,
    tiny_llama,
    tiny_model,
    untrained_head,
)
from tests.e2e.test_greedy import GREEDY, job, prompt
from vllm_specinfer import cache
from vllm_specinfer.hooks import compile_cache
from vllm_specinfer.kernels.cpu import extension

AOT, FOLDER = compile_cache.AOT_ENV, compile_cache.FOLDER_ENV


Generated = tuple[list[int], dict[str, int], int]


def generate(llm: dict) -> Generated:
    """Start an engine; its text, what inductor has found and compiled, and how often
    layers have attended to trees alone from Python."""
    from torch._dynamo.utils import counters
    from vllm import LLM, SamplingParams

    from vllm_specinfer.attention.cpu import CPUTreeAttentionImpl, TreeAttentionMetadata

    forward, of_trees = CPUTreeAttentionImpl.forward, []

    def counted(self, layer, query, key, value, kv_cache, metadata, *args, **kwargs):
        if isinstance(metadata, TreeAttentionMetadata) and metadata.prompts is None:
            of_trees.append(layer)
        rest = (kv_cache, metadata, *args)
        return forward(self, layer, query, key, value, *rest, **kwargs)

    processes.hasten_starts()
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with mock.patch.object(CPUTreeAttentionImpl, "forward", counted):
        (output,) = LLM(**llm).generate([{"prompt_token_ids": [1, 2, 3]}], params)
    return output.outputs[0].token_ids, dict(counters["aot_autograd"]), len(of_trees)


def test_the_second_start_compiles_nothing(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0, num_hidden_layers=1)
    llm = engine.tiny(target)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    trees = {**llm, "speculative_config": {"method": "specinfer", "model": ssm}}
    env = {FOLDER: str(tmp_path / "cache")}
    # Each in a process of its own, which has compiled nothing.
    first, compiled, _ = processes.call(generate, trees, **env)
    again, found, from_python = processes.call(generate, trees, **env)
    assert compiled["autograd_cache_miss"] > 0
    assert found["autograd_cache_hit"] == 2  # target and SSM
    assert "autograd_cache_miss" not in found
    launchers = (tmp_path / "cache").rglob("*.main.cpp")
    assert sum("inductor_entry_cpp" in file.read_text() for file in launchers) == 2
    eager = {"enforce_eager": True}
    plain, *_ = processes.call(generate, {**llm, **eager})
    assert first == again == plain
    # From C++ only what has been compiled runs its passes over trees.
    *_, from_python_eager = processes.call(generate, {**trees, **eager})
    assert from_python == 0 < from_python_eager


def test_compiled_engines_write_the_texts_of_eager_ones(tmp_path):
    """Prompts in chunks beside trees, both kinds of layers, draws, a head's states."""
    long = {"max_position_embeddings": 160}
    alternating = tiny_model("gemma2", seed=0, sliding_window=64, scale=2, **long)
    alternating.save_pretrained(tmp_path / "alternating")
    target = tiny_llama(tmp_path / "target", seed=0, **long)
    head = untrained_head(target, tmp_path / "head")
    prompts = [prompt(length, length) for length in (3, 40, 90, 31, 100)]
    params = [
        {**GREEDY, "max_tokens": 30, "temperature": 0.7 * (i % 2), "seed": i}
        for i in range(len(prompts))
    ]
    llm = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 160}
    jobs = [
        job(pair, config, params, prompts, enforce_eager=eager, **llm)
        for pair, config in (
            ((str(tmp_path / "alternating"), "suffix"), {}),
            ((target, head), {"tree": "2,2"}),
        )
        for eager in (True, False)
    ]
    found = engine.run(jobs, TORCHDYNAMO_DISABLE="0")
    for eager, compiled in zip(found[::2], found[1::2], strict=True):
        for counted in ("tokens", "drafts", "accepted"):
            assert compiled[counted] == eager[counted], counted
        assert compiled["accepted"] > compiled["drafts"] / 10


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({FOLDER: "/mine"}, {AOT: "0", FOLDER: "/mine"}),
        ({AOT: "1"}, {AOT: "1"}),
        ({"VLLM_DISABLE_COMPILE_CACHE": "1"}, {}),
        ({"VLLM_USE_BYTECODE_HOOK": "0"}, {}),
    ],
)
def test_what_the_user_has_set_stays(monkeypatch, before, after):
    assert enabled(monkeypatch, **before) == after


def enabled(monkeypatch, **env: str) -> dict[str, str]:
    """What is set after `enable` where the user has set this."""
    for name in (AOT, FOLDER):
        # Set first: an absent variable that is deleted is not restored afterwards.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    compile_cache.enable()
    return {name: os.environ[name] for name in (AOT, FOLDER) if name in os.environ}


def test_unequal_machines_and_releases_share_no_code(monkeypatch, tmp_path):
    """Inductor's cache asks neither for the CPU nor for vLLM's operators and ours."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    folders = [enabled(monkeypatch)[FOLDER]]
    assert folders[0].startswith("/cache/torch_compile_cache/inductor-")
    assert enabled(monkeypatch)[FOLDER] == folders[0]
    capability = torch.backends.cpu, "get_cpu_capability"
    for holder, name in ((cache, "cpu"), capability):
        with monkeypatch.context() as other:
            other.setattr(holder, name, lambda: "another one")
            folders.append(enabled(other)[FOLDER])
    with monkeypatch.context() as other:
        other.setattr(vllm, "__version__", "0.1.0")
        folders.append(enabled(other)[FOLDER])
    operators = tmp_path / "linear_bindings.cpp"
    source = extension.OPERATORS.read_text()
    operators.write_text(source.replace("int outputs", "int n"))
    with monkeypatch.context() as other:
        other.setattr(extension, "OPERATORS", operators)
        folders.append(enabled(other)[FOLDER])
    assert len(set(folders)) == 5
