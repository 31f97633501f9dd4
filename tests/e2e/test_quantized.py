"""Targets and SSMs with quantized weights: the text is plain decoding's."""

import pytest

from tests.e2e import engine
from tests.e2e.models import fit_head, tiny_model
from tests.e2e.quantized import save_quantized
from tests.e2e.test_greedy import GREEDY, PROMPTS, job

PARAMS = [{**GREEDY, "temperature": 0.7 * (i % 2), "seed": i} for i in range(8)]
# vLLM has its 4-bit kernels for half precision only. There two passes of plain vLLM
# part, too, where the best logits tie; these weights have no such tie on the way.
DTYPES = {"int8": "float32", "gptq": "float16", "awq": "float16"}


def jobs(folder, name):
    """Plain decoding, and trees of an SSM with float and with quantized weights."""
    target = tiny_model("llama", seed=0, max_position_embeddings=256)
    path = save_quantized(target, folder / f"{name}-target", name)
    ssm = tiny_model("llama", seed=1, num_hidden_layers=1, max_position_embeddings=256)
    ssms = folder / f"{name}-float", folder / f"{name}-ssm"
    fit_head(ssm, target)
    ssm.save_pretrained(ssms[0])
    save_quantized(ssm, ssms[1], name)
    llm = {"params": PARAMS, "prompts": PROMPTS, "dtype": DTYPES[name]}
    trees = [job((path, str(s)), {"tree": "4,2,2"}, **llm) for s in ssms]
    return [{**job((path, None), **llm), "plain_v2": True}, *trees]


@pytest.mark.parametrize("name", DTYPES)
def test_the_text_is_plain_decodings(tmp_path, name):
    plain, *trees = engine.run(jobs(tmp_path, name))
    for tree in trees:
        print(name, 1 + tree["accepted"] / tree["drafts"], "tokens per step")
        assert tree["tokens"] == plain["tokens"]
        assert tree["accepted"] > tree["drafts"] / 5 and tree["branches"] > 10
