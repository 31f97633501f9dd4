"""Plain decoding on V2 with the package's CPU kernels equals V1's."""

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.e2e import engine
from tests.e2e.models import VOCAB, add_tokenizer, tiny_llama

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
CASES = {
    "greedy": {},
    "top_k_1": {"temperature": 0.7, "top_k": 1},
    "tiny_top_p": {"temperature": 1.3, "top_p": 1e-6},
    "min_p_1": {"temperature": 0.9, "min_p": 1.0},
    "penalties": {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.6,
        "presence_penalty": 0.4,
    },
    "logit_bias": {"logit_bias": {7: 2.5, 9: -100.0, 11: 2.5}},
    "allowed": {"allowed_token_ids": [3, 5, 8, 13]},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "regex": {
        "structured_outputs": {"regex": "[ab]{3}c[0-9]{4}"},
        "ignore_eos": False,
    },
    # Longer than the 32 tokens of a step: prefill in chunks.
    "chunked": {},
}
# V1 on CPU fails on a request's own seed ("does not use offset").
SEEDED = {
    "seeded": {"temperature": 1.0, "seed": 1234, "max_tokens": 20},
    "seeded_again": {"temperature": 1.0, "seed": 1234, "max_tokens": 20},
    "other_seed": {"temperature": 1.0, "seed": 1235, "max_tokens": 20},
}
LENGTHS = {"chunked": 90, "prompt_logprobs": 50}


def prompt(name: str) -> list[int]:
    """Of its own for each of `CASES`."""
    seed = list(CASES).index(name) if name in CASES else 0
    return [(seed * 37 + i * i * 11) % VOCAB for i in range(LENGTHS.get(name, 11))]


@torch.inference_mode()
def greedy_text(model: str) -> list[int]:
    """The tokens behind `prompt("greedy")`, by transformers."""
    llama = LlamaForCausalLM.from_pretrained(model)
    ids = torch.tensor([prompt("greedy")])
    for _ in range(GREEDY["max_tokens"]):
        ids = torch.cat([ids, llama(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[0, -GREEDY["max_tokens"] :].tolist()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("plain") / "target"
    target = tiny_llama(folder, seed=1, scale=5, eos_token_id=95)
    add_tokenizer(target, eos=95)
    text = greedy_text(target)
    words = [text[2:4], text[7:8]]
    cases = CASES | {
        "bad_words": {"bad_words": ["".join(chr(32 + t) for t in w) for w in words]},
        "min_tokens": {"stop_token_ids": [text[1]], "min_tokens": 6},
        "no_min_tokens": {"stop_token_ids": [text[1]]},
    }
    llm = {
        **engine.tiny(target),
        "skip_tokenizer_init": False,
        "enforce_eager": True,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    names = {"v1": cases, "v2": cases | SEEDED}
    jobs = [
        {
            "llm": llm,
            "plain_v2": runner == "v2",
            "prompts": [prompt(name) for name in names[runner]],
            "params": [GREEDY | params for params in names[runner].values()],
        }
        for runner in names
    ]
    # V1 runs first, in a process that has none of the package's kernels yet.
    results = dict(zip(names, engine.run(jobs, VLLM_PLUGINS=""), strict=True))
    for runner, result in results.items():
        for kind in ("tokens", "texts", "logprobs", "prompt_logprobs"):
            result[kind] = dict(zip(names[runner], result[kind], strict=True))
    assert results["v1"]["tokens"]["greedy"] == [text]
    return results


def test_each_engine_ran_the_runner_under_test(results) -> None:
    assert results["v1"]["runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert results["v2"]["runner"] == "vllm.v1.worker.cpu.model_runner.CPUModelRunner"


@pytest.mark.parametrize("name", [*CASES, "bad_words", "min_tokens", "no_min_tokens"])
def test_v2_gives_the_tokens_of_v1(results, name: str) -> None:
    for kind in ("tokens", "texts"):
        assert results["v2"][kind][name] == results["v1"][kind][name]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_v2_gives_the_logprobs_of_v1(results, name: str) -> None:
    got, expected = (results[runner][name][name] for runner in ("v2", "v1"))
    if name == "logprobs":
        (got,), (expected,) = got, expected
    assert len(got) == len(expected) > 0
    for step, reference in zip(map(sorted, got), map(sorted, expected), strict=True):
        assert [(token, rank) for token, _, rank in step] == [
            (token, rank) for token, _, rank in reference
        ]
        assert [value for _, value, _ in step] == pytest.approx(
            [value for _, value, _ in reference], abs=1e-4
        )


def test_a_seed_decides_the_sample(results) -> None:
    tokens = results["v2"]["tokens"]
    assert tokens["seeded"] == tokens["seeded_again"] != tokens["other_seed"]
