"""Structured output speculates too: grammar states follow the paths of the trees."""

import json

import pytest

from tests.e2e import engine
from tests.e2e.models import add_tokenizer, noisy_copy, tiny_llama
from tests.e2e.test_greedy import PROMPTS, TREES, job
from tests.e2e.test_sampling import GREEDY, SAMPLED, plain

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer"},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": {"regex": "([a-f]{2,5}-[0-9]{1,4} ){2,6}"},
    "json": {"json": SCHEMA},
    "choice": {"choice": ["yes, certainly", "yes, perhaps", "no"]},
    "grammar": {"grammar": 'root ::= ("(" root ")" | [x-z] | root [+*] root)'},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0, scale=3, eos_token_id=95)
    pair = target, noisy_copy(target, folder / "ssm", noise=0.02)
    add_tokenizer(*pair, eos=95)
    return pair


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_structured_output_is_that_of_plain_decoding(models, backend):
    llm = {
        "skip_tokenizer_init": False,
        "structured_outputs_config": {"backend": backend},
    }
    grammars = list(GRAMMARS.values())
    if backend == "outlines":
        grammars[-1] = grammars[0]  # it has none
    params = [
        {**kind, "structured_outputs": grammar, "ignore_eos": False}
        for kind in (GREEDY, SAMPLED)
        for grammar in grammars
    ]
    params += [GREEDY, SAMPLED]
    prompts = [PROMPTS[3 + i % 4] for i in range(len(params))]
    expected, tree, wide, wrong = engine.run(
        [
            plain(models, params, prompts, **llm),
            job(models, {}, params, prompts, **llm),
            job(models, TREES["wide"], params, prompts, **llm),
            {
                **job(models, TREES["wide"], params, prompts, **llm),
                "mutation": "chain_grammar",
            },
        ]
    )
    for got in (tree, wide):
        assert got["tokens"] == expected["tokens"]
        assert got["accepted"] > got["drafts"] / 10
    texts = [
        "".join(chr(32 + t) for t in tokens if t != 95)
        for (tokens,) in expected["tokens"]
    ]
    assert texts[2] in GRAMMARS["choice"]["choice"]
    assert texts[0].replace(" ", "").replace("-", "").isalnum()
    assert texts[1].startswith("{")
    print(json.dumps(texts, indent=1))
    assert wrong["tokens"] != expected["tokens"]
