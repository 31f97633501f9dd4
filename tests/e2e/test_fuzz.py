"""Random combinations of what a request can ask for: the text of plain decoding."""

import random

import pytest

from tests.e2e import engine
from tests.e2e.models import VOCAB, add_tokenizer, noisy_copy, tiny_llama
from tests.e2e.test_greedy import job, prompt
from tests.e2e.test_sampling import same_logprobs

NUM_CASES = 200


def a_request(seed: int) -> tuple[list[int], dict]:
    """A prompt and sampling parameters."""
    rng = random.Random(seed)
    params = {
        "max_tokens": rng.randint(1, 40),
        "temperature": rng.choice([0, 0, 0.3, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(1 << 62),
    }

    def text(most: int) -> str:
        characters = rng.choices(range(33, 32 + VOCAB), k=rng.randint(1, most))
        return "".join(map(chr, characters))

    options = {
        "top_k": lambda: rng.randint(1, 40),
        "top_p": lambda: rng.uniform(0.2, 1),
        "min_p": lambda: rng.uniform(0, 0.3),
        "repetition_penalty": lambda: rng.uniform(0.8, 1.6),
        "presence_penalty": lambda: rng.uniform(-1, 1.5),
        "frequency_penalty": lambda: rng.uniform(-0.5, 1.5),
        "logit_bias": lambda: {
            rng.randrange(VOCAB): rng.uniform(-5, 5) for _ in range(5)
        },
        "allowed_token_ids": lambda: rng.sample(range(VOCAB), rng.randint(3, 60)),
        "bad_words": lambda: [
            "".join(
                chr(33 + rng.randrange(VOCAB - 1)) for _ in range(rng.randint(1, 2))
            )
            for _ in range(4)
        ],
        "stop": lambda: [chr(33 + rng.randrange(VOCAB - 1)) for _ in range(2)],
        "stop_token_ids": lambda: rng.sample(range(VOCAB), 3),
        "ignore_eos": lambda: True,
        "logprobs": lambda: rng.randint(0, 4),
        "prompt_logprobs": lambda: rng.randint(0, 2),
        "n": lambda: rng.randint(2, 3),
    }
    for name in rng.sample(sorted(options), rng.randint(0, 5)):
        params[name] = options[name]()
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(1, params["max_tokens"])
    if params["temperature"] == 0 and params.get("n", 1) > 1:
        del params["n"]  # vLLM refuses it
    return prompt(rng.randint(1, 70), seed), params


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        ("raw_logprobs", {}),
        ("processed_logprobs", {"tree": "3,2,1,1"}),
        ("raw_logits", {"sources": True}),
    ],
)
def test_random_requests_are_served_as_without_trees(tmp_path, mode, config):
    target = tiny_llama(tmp_path / "target", seed=0, scale=3, eos_token_id=5)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    add_tokenizer(target, ssm)
    if config.get("sources"):
        config = {"model": None, "ssms": [ssm, "suffix"], "num_speculative_tokens": 10}
    requests = [a_request(seed) for seed in range(NUM_CASES)]
    prompts, params = [r[0] for r in requests], [r[1] for r in requests]
    llm = {"logprobs_mode": mode, "max_num_seqs": 7, "skip_tokenizer_init": False}
    models = (target, ssm)
    plain = {**job(models, None, params, prompts, **llm), "plain_v2": True}
    expected, tree = engine.run([plain, job(models, config, params, prompts, **llm)])
    assert tree["accepted"] > tree["drafts"] / 4
    for i in range(NUM_CASES):
        assert tree["tokens"][i] == expected["tokens"][i], params[i]
        logprobs = zip(tree["logprobs"][i], expected["logprobs"][i], strict=True)
        for ours, theirs in logprobs:
            same_logprobs(ours, theirs)
        same_logprobs(tree["prompt_logprobs"][i], expected["prompt_logprobs"][i])
    assert len({len(t) for case in expected["tokens"] for t in case}) > 10
