"""Targets and SSMs with quantized weights: the text is that of plain decoding."""

import pytest

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.quantized import quantized_copy
from tests.e2e.test_greedy import GREEDY, PROMPTS, job

PARAMS = [{**GREEDY, "temperature": 0.7 * (i % 2), "seed": i} for i in range(8)]
# vLLM has its 4-bit kernels for half precision only.
DTYPES = {"int8": "float32", "gptq": "float16", "awq": "float16"}


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


@pytest.mark.parametrize("name", DTYPES)
def test_the_text_is_plain_decodings(tmp_path, name):
    plain, *trees = engine.run(jobs(tmp_path, name))
    for tree in trees:
        print(name, 1 + tree["accepted"] / tree["drafts"], "tokens per step")
        assert tree["tokens"] == plain["tokens"]
        assert tree["accepted"] > tree["drafts"] / 2 and tree["branches"] > 10
