"""Random configurations, engines and requests: the texts of plain decoding."""

import random

from tests.e2e import engine
from tests.e2e.models import add_tokenizer, noisy_copy, tiny_llama, untrained_head
from tests.e2e.test_fuzz import a_request
from tests.e2e.test_greedy import job
from vllm_specinfer.options import TESTS_DRAWS
from vllm_specinfer.parsing import parse_options

NUM_ENGINES = 24
LENGTHS = (24, 100, 256)


def a_tree(rng: random.Random) -> dict | list[int]:
    """An expansion or a best-first tree."""
    if rng.random() < 0.5:
        return rng.choices([1, 1, 2, 3], k=rng.randint(1, 5))
    limits = {
        "max_depth": rng.randint(1, 7),
        "max_width": rng.randint(1, 9),
        "min_probability": rng.choice([0, 0.02, 0.2, 0.9]),
    }
    return {name: limits[name] for name in limits if rng.random() < 0.8}


def a_config(rng: random.Random, models: list[str]) -> dict:
    """A speculative config that no check refuses."""
    while True:
        sources = rng.choices([*models, "ngram", "suffix"], k=rng.randint(1, 3))
        config = {
            "ssms": [
                {"model": source, "tree": a_tree(rng)}
                if source in models and rng.random() < 0.4
                else source
                for source in sources
            ],
            "verification": rng.choice(["coupled", "mss", "rrs", "naive"]),
            "scheduler": rng.choice(["auto", "static", "learned"]),
        }
        options = {
            "tree": lambda: a_tree(rng),
            "num_speculative_tokens": lambda: rng.randint(1, 70),
            "num_speculative_tokens_per_batch_size": lambda: [
                [1, 2, rng.randint(0, 4)],
                [3, 1024, rng.randint(0, 2)],
            ],
        }
        for name in rng.sample(sorted(options), rng.randint(0, 2)):
            config[name] = options[name]()
        try:
            parse_options(config)
        except ValueError:
            continue
        if sum(source == models[-1] for source in sources) < 2:  # heads
            return {"model": None, **config}


def an_engine(seed: int, models: list[str]) -> dict:
    """A job with trees."""
    rng = random.Random(seed)
    config, length = a_config(rng, models), rng.choice(LENGTHS)
    llm = {
        "skip_tokenizer_init": False,
        "max_model_len": length,
        "max_num_seqs": rng.choice([1, 2, 8]),
        "max_num_batched_tokens": rng.choice([64, 130, 512]),
        # Enough for all of them, and for one: then they preempt each other.
        "num_gpu_blocks_override": rng.choice([400, -(-length // 32) + 1]),
        "enable_prefix_caching": rng.random() < 0.5,
    }
    prompts, params = [], []
    for i in range(rng.randint(2, 12)):
        prompt, wanted = a_request(100 * seed + i)
        if rng.random() < 0.6:  # many of these fit in, until they have grown
            prompt = prompt[:20]
            wanted |= {"max_tokens": rng.randint(60, 120), "ignore_eos": True}
        prompts.append(prompt[: length - 2])
        params.append(wanted)
    trees = job(models[:2], config, params, prompts, **llm)
    if rng.random() < 0.3:
        trees["mutation"] = "trees_of_any_size"
    return trees


def test_random_engines_decode_as_without_trees(tmp_path):
    target = tiny_llama(tmp_path / "target", seed=0, scale=3, eos_token_id=5)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    head = untrained_head(target, tmp_path / "head")
    add_tokenizer(target, ssm)
    engines = {
        seed: an_engine(seed, [target, ssm, head]) for seed in range(NUM_ENGINES)
    }
    accepted = preemptions = 0
    for length in LENGTHS:
        served = {
            seed: with_trees
            for seed, with_trees in engines.items()
            if with_trees["llm"]["max_model_len"] == length
        }
        # Plain texts depend on nothing else that engines differ in: one writes them.
        prompts = [p for with_trees in served.values() for p in with_trees["prompts"]]
        params = [p for with_trees in served.values() for p in with_trees["params"]]
        llm = {"skip_tokenizer_init": False, "max_model_len": length}
        plain = {**job((target, ssm), None, params, prompts, **llm), "plain_v2": True}
        plain, *trees = engine.run([plain, *served.values()])
        texts = iter(plain["tokens"])
        for (seed, with_trees), got in zip(served.items(), trees, strict=True):
            spec = with_trees["llm"]["speculative_config"]
            for wanted, found in zip(with_trees["params"], got["tokens"], strict=True):
                expected = next(texts)
                tests_draws = spec["verification"] in TESTS_DRAWS
                drawn = tests_draws and wanted["temperature"] > 0
                assert drawn or found == expected, (seed, spec, wanted)
            assert got["free_blocks"] == got["blocks"] - 1, (seed, spec)
            accepted += got["accepted"]
            preemptions += got["preemptions"]
    assert accepted > 100 and preemptions > 5
