"""Targets and SSMs with weights of few bits: the text is that of plain decoding.

Where activations are rounded to eight bits, the last bit of a float decides now and
then on which side, which moves a logit by some hundredths; half precision moves it by
less. So a text may part from plain decoding's where the two best logits are that close.
"""

import pytest
import torch

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama, untrained_head
from tests.e2e.quantized import fp8_cache_copy, quantized_copy
from tests.e2e.test_greedy import GREEDY, PROMPTS, job

PARAMS = [
    {**GREEDY, "temperature": 0.7 * (i % 2), "seed": i, "logprobs": 2} for i in range(8)
]
# vLLM has its 4-bit kernels for half precision only, and for AMX that of int8.
WITH_TILES = torch.cpu._is_amx_tile_supported()
INT8 = "bfloat16" if WITH_TILES else "float32"
DTYPES = {"int8": INT8, "gptq": "float16", "awq": "float16"}
# By type the gap, and how many texts may part; 0.125 is two steps of bfloat16 at logits
# of 8 to 16.
CLOSE = {"float32": 0.05, "float16": 0.05, "bfloat16": 0.125}
MOST_PARTED = {"float32": 1, "float16": 1, "bfloat16": 4}
CACHES = ["fp8", "e5m2", "checkpoint", "mixed"]


def jobs(folder, name):
    """Plain decoding, and trees of an SSM with float and with quantized weights."""
    target = tiny_llama(folder / "float", seed=0)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    target, quantized = (
        quantized_copy(model, folder / f"{name}{i}", name)
        for i, model in enumerate((target, ssm))
    )
    llm = {"params": PARAMS, "prompts": PROMPTS, "dtype": DTYPES[name]}
    trees = [job((target, s), {"tree": "4,2,2"}, **llm) for s in (ssm, quantized)]
    return [{**job((target, None), **llm), "plain_v2": True}, *trees]


def parted(plain, tree):
    """Per text the first token that differs, None where all are the same."""
    return [
        next((n for n in range(len(ours)) if ours[n] != theirs[n]), None)
        for (ours,), (theirs,) in zip(tree["tokens"], plain["tokens"], strict=True)
    ]


@pytest.mark.parametrize("name", DTYPES)
def test_the_text_is_plain_decodings_but_for_ties(tmp_path, name):
    if name != "int8" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels for four bits want AVX-512")
    plain, *trees = engine.run(jobs(tmp_path, name))
    for tree in trees:
        part_at_ties_only(plain, tree, DTYPES[name])
        assert tree["accepted"] > tree["drafts"] / 2 and tree["branches"] > 10


def part_at_ties_only(plain, tree, dtype, most=None):
    """Few texts part, half of them sampled at most, greedy ones at close logits."""
    most = MOST_PARTED[dtype] if most is None else most
    found = parted(plain, tree)
    print(dtype, 1 + tree["accepted"] / tree["drafts"], "tokens per step", found)
    assert found.count(None) >= len(PARAMS) - most
    sampled = [n for n, p in zip(found, PARAMS, strict=True) if p["temperature"]]
    assert sampled.count(None) >= len(sampled) - most / 2
    for i, n in enumerate(found):
        if n is not None and not PARAMS[i]["temperature"]:
            assert plain["gaps"][i][0][n] < CLOSE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_text_is_plain_decodings_in_half_precision(tmp_path, dtype):
    target = tiny_llama(tmp_path / "target", seed=0)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    head = untrained_head(target, tmp_path / "head")
    llm = {"params": PARAMS, "prompts": PROMPTS, "dtype": dtype}
    plain, of_ssm, of_head = engine.run(
        [
            {**job((target, None), **llm), "plain_v2": True},
            job((target, ssm), {"tree": "4,2,2"}, **llm),
            job((target, head), {"tree": "4,2,2"}, **llm),
        ]
    )
    for tree in (of_ssm, of_head):
        part_at_ties_only(plain, tree, dtype, most=4)
    assert of_ssm["accepted"] > of_ssm["drafts"] / 2 and of_ssm["branches"] > 10
    assert of_head["accepted"] > of_head["drafts"] / 10


def cache_jobs(folder):
    """Plain decoding and trees, with K/V caches of eight bits."""
    target = tiny_llama(folder / "target", seed=0)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    asking = fp8_cache_copy(target, folder / "asking", scale=0.3)
    cases = {
        "fp8": (target, {"kv_cache_dtype": "fp8"}),
        "e5m2": (target, {"kv_cache_dtype": "fp8_e5m2"}),
        "checkpoint": (asking, {"kv_cache_dtype": "auto"}),
        "mixed": (
            target,
            {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]},
        ),
    }
    runs = {}
    for name, (model, llm) in cases.items():
        llm |= {"params": PARAMS, "prompts": PROMPTS}
        runs[name, "plain"] = {**job((model, None), **llm), "plain_v2": True}
        runs[name, "tree"] = job((model, ssm), {"tree": "4,2,2"}, **llm)
    return runs


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM's kernels for fp8 want AVX-512")
    runs = cache_jobs(tmp_path_factory.mktemp("fp8"))
    return dict(zip(runs, engine.run(list(runs.values())), strict=True))


@pytest.mark.parametrize("name", CACHES)
def test_the_text_is_plain_decodings_with_a_cache_of_eight_bits(cached, name):
    plain, tree = cached[name, "plain"], cached[name, "tree"]
    print(name, 1 + tree["accepted"] / tree["drafts"], "tokens per step")
    assert tree["tokens"] == plain["tokens"]
    assert tree["accepted"] > tree["drafts"] / 2 and tree["branches"] > 10


def test_each_cache_rounds_in_its_own_way(cached):
    texts = [cached[name, "plain"]["tokens"] for name in CACHES]
    assert all(texts.count(text) == 1 for text in texts)
