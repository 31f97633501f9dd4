"""Greedy text with specinfer is plain vLLM's, whatever the tree and the batch.

Random float32 models: the target, and an SSM that agrees with it most of the time, so
that every step accepts something and rejects something.
"""

import random
from pathlib import Path

import pytest

from tests.e2e import engine
from tests.e2e.models import VOCAB, noisy_copy, tiny_llama
from vllm_specinfer.scheduling.cost import CostLine

TREES = {
    "chain": {"tree": "1,1,1,1"},
    "flat": {"tree": "4"},
    "binary": {"tree": "2,2,1"},
    "paper": {"tree": "1,1,3,1,1,1,1,1"},
    "wide": {"tree": "4,2,2,1,1"},
    "best_first": {},
    "many_nodes": {
        "tree": {"max_depth": 8, "max_width": 16, "min_probability": 0},
        "num_speculative_tokens": 80,
    },
    "truncated": {"tree": "3,3,2", "num_speculative_tokens": 7},
}


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


PROMPTS = [prompt(length, length) for length in (1, 3, 17, 31, 32, 33, 64, 90)]
GREEDY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder: Path = tmp_path_factory.mktemp("models")
    target = tiny_llama(folder / "target", seed=0)
    return target, noisy_copy(target, folder / "ssm", noise=0.05)


@pytest.fixture(scope="module")
def plain(models) -> dict:
    return engine.run([job(models)])[0]


@pytest.fixture(scope="module")
def wide(models) -> dict:
    return engine.run([job(models, TREES["wide"])])[0]


def job(models, config=None, params=None, prompts=None, batched=True, **llm):
    target, ssm = models
    llm = {
        "model": target,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "block_size": 32,
        # The least memory vLLM's option gives takes seconds to clear.
        "num_gpu_blocks_override": 400,
        **llm,
    }
    if config is not None:
        # All nodes in every step: what the budget admits depends on the machine.
        common = {"method": "specinfer", "model": ssm, "scheduler": "static"}
        llm["speculative_config"] = {**common, **config}
    return {
        "llm": llm,
        "prompts": prompts or PROMPTS,
        "params": params or [GREEDY],
        "batched": batched,
    }


def check(plain: dict, tree: dict) -> None:
    assert tree["tokens"] == plain["tokens"]
    assert tree["drafts"] > 0
    assert tree["free_blocks"] == tree["blocks"] - 1  # all but vLLM's null block


def test_every_tree_shape_is_token_identical_at_batch_8_and_1(models, plain, wide):
    others = [name for name in TREES if name != "wide"]
    jobs = [job(models, TREES[name]) for name in others]
    jobs.append(job(models, TREES["wide"], batched=False))
    jobs += [job(models, {"scheduler": "auto"}, batched=b) for b in (True, False)]
    *trees, batch, alone = engine.run(jobs)
    assert batch["tokens"] == alone["tokens"] == plain["tokens"]
    assert batch["drafts"] > 0 < alone["drafts"]
    # The time before a request is no step's, even where its prompt is a single token.
    learned = alone["learned"]["budget"]["step"]
    seconds = sum(values[0] for values in learned["values"])
    assert 0 < seconds / sum(products[0][0] for products in learned["products"]) < 1
    names = [*others, "wide, batch 1", "wide"]
    for name, tree in zip(names, [*trees, wide], strict=True):
        print(name, 1 + tree["accepted"] / tree["drafts"], "tokens per step")
        check(plain, tree)
        assert tree["accepted"] > tree["drafts"] / 2, name


def test_an_engine_starts_with_measured_costs(models):
    idle = {**job(models, {"scheduler": "auto"}), "prompts": []}
    (found,) = engine.run([idle])
    learned = found["learned"]["budget"]
    for name in ("step", "draft"):
        line = CostLine()
        line.recall(learned[name])
        assert line.num_timings > 5
        assert 0 < line.seconds(1) <= line.seconds(64) < 1


def test_tight_engines_are_token_identical(models):
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
    jobs += [job(models, {}, [long], prompts, **extra) for extra in tight.values()]
    plain, *trees = engine.run(jobs)
    assert {len(t[0]) for t in plain["tokens"]} == {
        min(200, 256 - len(p)) for p in prompts
    }
    for name, tree in zip(tight, trees, strict=True):
        check(plain, tree)
        assert (tree["preemptions"] > 0) == (name == "preemption")
        assert tree["accepted"] > tree["drafts"] / 10
        assert tree["cache_hits"] > 0 or name == "chunks"


def test_requests_that_end_early_share_a_batch_with_those_that_do_not(models):
    params = [
        GREEDY,
        {**GREEDY, "max_tokens": 1},
        {**GREEDY, "stop_token_ids": list(range(0, VOCAB, 8))},
    ]
    prompts = PROMPTS[: len(params)]
    plain, tree = engine.run(
        [
            job(models, params=params, prompts=prompts),
            job(models, {}, params, prompts),
        ]
    )
    check(plain, tree)


def test_a_batch_schedule_caps_the_trees(models, plain):
    schedule = [[1, 2, 3], [3, 8, 0]]
    config = {"num_speculative_tokens_per_batch_size": schedule}
    many, few = engine.run([job(models, config), job(models, config, max_num_seqs=2)])
    assert many["tokens"] == few["tokens"] == plain["tokens"]
    assert many["drafted"] == 0
    assert many["metrics"]["plain_request_steps schedule"] == many["decode_steps"]
    # Fewer than three where the requests' last tokens are near.
    assert 2.5 * few["drafts"] < few["drafted"] <= 3 * few["drafts"]


def test_without_a_compiler_plain_torch_writes_the_same_texts(models, tmp_path):
    params = [{**GREEDY, "temperature": 0.7 * (i % 2), "seed": i} for i in range(8)]
    plain, best_first, wide = engine.run(
        [
            {**job(models, None, params), "plain_v2": True},
            job(models, {"scheduler": "auto"}, params),
            job(models, TREES["wide"], params),
        ],
        CXX="no-such-compiler",
        VLLM_CACHE_ROOT=str(tmp_path),
    )
    assert best_first["tokens"] == wide["tokens"] == plain["tokens"]
    assert wide["accepted"] > wide["drafts"] / 2
    assert not list(tmp_path.rglob("*.so"))


def test_ssms_that_sat_out_for_long_read_in_pieces(models):
    """While eight requests run there are no trees; then four have much to read."""
    schedule = [[1, 4, 8], [5, 8, 0]]
    config = {"num_speculative_tokens_per_batch_size": schedule}
    prompts = [prompt(90 + n, n) for n in range(8)]
    params = [{**GREEDY, "max_tokens": 20 + 60 * (n % 2)} for n in range(8)]
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    plain, tree = engine.run(
        [
            job(models, None, params, prompts),
            job(models, config, params, prompts, **chunks),
        ]
    )
    assert tree["tokens"] == plain["tokens"]
    assert tree["accepted"] > tree["drafts"] / 2
    # 64 in a step until no more than 128 are left.
    assert 8 <= tree["metrics"]["plain_request_steps budget"] <= 32


def test_steps_of_few_rows_do_without_vllms_attention(models):
    few = [p for p in PROMPTS if len(p) <= 17]
    tree = job(models, TREES["wide"], prompts=few)
    plain, tree = engine.run(
        [job(models, prompts=few), {**tree, "mutation": "no_stock_attention"}]
    )
    check(plain, tree)


def test_a_token_leaves_before_the_next_tree_is_drafted(models):
    params = {**GREEDY, "max_tokens": 2}
    slow = job(models, {}, [params], PROMPTS[:1])
    slow["mutation"] = "drafts_take_a_second"
    (result,) = engine.run([slow])
    assert result["drafts"] == 1
    assert max(result["first_token_seconds"]) < 1


def test_an_ssm_that_is_always_wrong_changes_nothing(models, plain, tmp_path):
    target, _ = models
    wrong = tiny_llama(
        tmp_path / "wrong",
        seed=99,
        num_hidden_layers=1,
        hidden_size=64,
        head_dim=64,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    (tree,) = engine.run([job((target, wrong), TREES["wide"])])
    check(plain, tree)


def test_the_equality_test_sees_each_wrong_rule(models, plain, wide):
    """A causal mask, flat positions, no commit, the wrong bonus row: all must show."""
    mutations = ("mask", "position", "commit", "bonus")
    jobs = [{**job(models, TREES["wide"]), "mutation": m} for m in mutations]
    mutants = engine.run(jobs)
    assert wide["tokens"] == plain["tokens"]
    for name, mutant in zip(mutations, mutants, strict=True):
        assert mutant["tokens"] != plain["tokens"], name
