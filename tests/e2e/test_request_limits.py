"""A request that Model Runner V2 has no room for is refused; the engine lives on."""

import re

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama

LIMITS = {
    "allowed_token_ids must be at most 1024": {"allowed_token_ids": list(range(1025))},
    "tokens in logit_bias must be at most 1024": {
        "logit_bias": dict.fromkeys(range(1025), 1.0)
    },
    "stop tokens of a request with min_tokens must be at most 128": {
        "stop_token_ids": list(range(129)),
        "min_tokens": 1,
    },
    "tokens in bad_words must be at most 1024": {"words": [[1] * 9] * 114},
    "seed \\+ n - 1 must be at most": {
        "seed": 2**63 - 1,
        "n": 2,
        "temperature": 1.0,
    },
}
WITHIN = (
    {"allowed_token_ids": list(range(1024))},
    {"stop_token_ids": list(range(129))},
    {"words": [[1] * 8] * 128},
    {"seed": 2**63 - 2, "n": 2, "temperature": 1.0},
    {"max_tokens": 2**40},
    {"max_tokens": 2**40, "min_tokens": 2**40},
)


def ask(job):
    """What an engine answers to each of these requests."""
    from vllm import LLM, SamplingParams
    from vllm.exceptions import VLLMValidationError

    llm, found = LLM(**job["llm"]), []
    for fields in job["params"]:
        fields = {"temperature": 0, "max_tokens": 4, **fields}
        words = fields.pop("words", None)
        params = SamplingParams(**fields, ignore_eos=True)
        params._bad_words_token_ids = words  # there is no tokenizer
        try:
            (output,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)
        except VLLMValidationError as error:
            found.append(str(error))
        else:
            found.append([len(one.token_ids) for one in output.outputs])
    return found


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, vocab_size=1100)
    ssm = noisy_copy(target, folder / "ssm", noise=0.05)
    config = {"method": "specinfer", "model": ssm}
    return {**engine.tiny(target), "speculative_config": config, "enforce_eager": True}


def test_what_tables_have_no_room_for_is_refused_and_the_engine_lives_on(llm):
    params = [fields for limit in LIMITS.values() for fields in (limit, {})]
    found = processes.call(ask, {"llm": llm, "params": params})
    for sentence, refusal, next_one in zip(
        LIMITS, found[::2], found[1::2], strict=True
    ):
        assert re.match(sentence, refusal) and next_one == [4]


def test_what_they_have_room_for_is_answered(llm):
    found = processes.call(ask, {"llm": llm, "params": WITHIN})
    assert found == [[4], [4], [4], [4, 4], *[[llm["max_model_len"] - 3]] * 2]
