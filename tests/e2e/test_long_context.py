"""Trees after thousands of tokens, and into the last position of all."""

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama
from tests.e2e.test_greedy import GREEDY, check, job, prompt

LENGTH = 8192
LLM = {
    "max_model_len": LENGTH,
    "max_num_batched_tokens": 2048,
    "enable_chunked_prefill": True,
    "num_gpu_blocks_override": 2 * LENGTH // 32 + 1,
}


def test_trees_after_7900_tokens_and_up_to_the_last_position(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0, max_position_embeddings=LENGTH)
    models = target, noisy_copy(target, tmp_path / "ssm", noise=0.05)
    prompts = [prompt(length, length) for length in (7900, LENGTH - 50)]
    params = [{**GREEDY, "max_tokens": 64}, {**GREEDY, "max_tokens": 64}]
    plain, tree = engine.run(
        [
            job(models, None, params, prompts, **LLM),
            job(models, {"tree": "4,2,2"}, params, prompts, **LLM),
        ]
    )
    check(plain, tree)
    assert [len(tokens) for (tokens,) in tree["tokens"]] == [64, 50]
    print(1 + tree["accepted"] / tree["drafts"], "tokens per step", tree["branches"])
    assert tree["accepted"] > tree["drafts"] and tree["branches"] > 3
