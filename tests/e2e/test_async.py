"""Asynchronous scheduling: a step is there before the output of the one before it.

vLLM switches it off on a CPU; here it is switched on again. The worker computes at once
what a GPU computes later, so this is the order of events without the overlap.
"""

import pytest

from tests.e2e import engine
from tests.e2e.models import VOCAB, add_tokenizer, noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, PROMPTS, TREES, job, prompt
from tests.e2e.test_sampling import SAMPLED, plain
from tests.e2e.test_structured_output import GRAMMARS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, scale=3, eos_token_id=95)
    pair = target, noisy_copy(target, folder / "ssm", noise=0.02)
    add_tokenizer(*pair)
    return pair


def asynchronous(*args, **kwargs) -> dict:
    return {**job(*args, **kwargs), "asynchronous": True}


def check(expected: dict, tree: dict) -> None:
    assert tree["steps_in_flight"] == 2
    assert tree["tokens"] == expected["tokens"]
    assert tree["drafts"] > 0 and tree["accepted"] > tree["drafts"] / 4
    assert tree["free_blocks"] == tree["blocks"] - 1


def test_texts_are_those_of_plain_decoding(models):
    params = [GREEDY, SAMPLED, {**GREEDY, "repetition_penalty": 1.3, "logprobs": 2}]
    params += [{**GREEDY, "max_tokens": n} for n in (1, 2)]
    params += [{**GREEDY, "stop_token_ids": list(range(0, VOCAB, 8))}, SAMPLED, GREEDY]
    few, each = {"max_num_seqs": 3}, {"per_request_spec_decode_metrics": "summary"}
    expected, *trees, auto = engine.run(
        [
            plain(models, params, PROMPTS),
            asynchronous(models, {}, params, **each),
            asynchronous(models, TREES["wide"], params),
            asynchronous(models, TREES["paper"], params, **few),
            asynchronous(models, {}, params, batched=False),
            asynchronous(models, {"scheduler": "auto"}, params),
        ]
    )
    for tree in trees:
        check(expected, tree)
        (rows,), (expected_rows,) = tree["logprobs"][2], expected["logprobs"][2]
        for row, expected_row in zip(rows, expected_rows, strict=True):
            values, others = ({t: v for t, v, _ in r} for r in (row, expected_row))
            assert values == pytest.approx(others, abs=1e-4)
    assert auto["tokens"] == expected["tokens"] and auto["drafts"] > 0
    assert sum(trees[0]["drafted_by_request"]) == trees[0]["drafted"]


def test_tight_engines(models):
    """Chunked prefill, shared prefixes, the last positions, preemption."""
    shared = prompt(70, 7)
    prompts = [shared + prompt(n, n) for n in (1, 2, 20, 40, 41, 60, 80, 100)]
    long = {**GREEDY, "max_tokens": 200}  # stopped by max_model_len
    tight = {
        "chunks": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
        "prefixes": {"enable_prefix_caching": True},
        "preemption": {"num_gpu_blocks_override": 24},
    }
    jobs = [job(models, params=[long], prompts=prompts)]
    jobs += [
        asynchronous(models, {}, [long], prompts, **extra) for extra in tight.values()
    ]
    expected, *trees = engine.run(jobs)
    for name, tree in zip(tight, trees, strict=True):
        check(expected, tree)
        assert (tree["preemptions"] > 0) == (name == "preemption")
        assert tree["accepted"] > tree["drafts"] / 10
        assert tree["cache_hits"] > 0 or name == "chunks"


def test_structured_output(models):
    llm = {"skip_tokenizer_init": False}
    params = [
        {**kind, "structured_outputs": grammar, "ignore_eos": False}
        for kind in (GREEDY, SAMPLED)
        for grammar in GRAMMARS.values()
    ]
    params += [GREEDY, SAMPLED]
    prompts = [PROMPTS[3 + i % 4] for i in range(len(params))]
    expected, *trees = engine.run(
        [
            plain(models, params, prompts, **llm),
            asynchronous(models, TREES["wide"], params, prompts, **llm),
            asynchronous(models, {}, params, prompts, **llm, max_num_seqs=1),
        ]
    )
    for tree in trees:
        check(expected, tree)


def test_what_is_counted_is_what_there_was(models):
    """No request has had as many drafts as the scheduler had to foresee."""
    tree = {"tree": {"max_depth": 4, "max_width": 4, "min_probability": 0.03}}
    now, later = engine.run([job(models, tree), asynchronous(models, tree)])
    assert now["tokens"] == later["tokens"]
    assert 0 < later["drafted"] == now["drafted"] < 7 * later["drafts"]
    assert later["accepted_per_pos"] == now["accepted_per_pos"]
    counters = {k: v for k, v in now["metrics"].items() if not isinstance(v, list)}
    assert counters["accepted_tokens ssm0"] > 0
    assert counters == {k: later["metrics"][k] for k in counters}
