"""Targets and SSMs of many families: the text is that of plain decoding."""

import pytest

from tests.e2e import engine
from tests.e2e.models import fit_head, tiny_model
from tests.e2e.test_greedy import GREEDY, job, prompt

# What of a batch is drawn, and that each text goes on to the last position.
PARAMS = [
    {**GREEDY, "temperature": 0.7 * (i % 2), "seed": i, "max_tokens": 96}
    for i in range(5)
]
PROMPTS = [prompt(length, length) for length in (1, 3, 17, 33, 64)]
LENGTH = 96
# As OPT-350M: the embedding is narrower than the layers, norms come after them.
NARROW_OPT = {"word_embed_proj_dim": 64, "do_layer_norm_before": False}
# Target and SSM, and what is special about either.
PAIRS = {
    "llama": ("qwen3", {}, {}),
    "qwen2": ("llama", {}, {}),
    "qwen3": ("opt", {}, NARROW_OPT),
    "opt": ("qwen2", {}, {}),
    "gpt2": ("llama", {}, {}),
    # With small weights its scaled, tied embedding repeats the last token.
    "gemma": ("llama", {"scale": 10}, {}),
    "mistral": ("olmo2", {}, {}),
    "mixtral": ("llama", {}, {}),
    "falcon": ("llama", {}, {}),
    # vLLM runs these through the modules of transformers.
    "phi": ("gpt2", {}, {"tie_word_embeddings": False}),
    "gpt_neox": ("llama", {}, {}),
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Plain decoding and trees, by the target's family."""
    folder = tmp_path_factory.mktemp("models")

    def pair(family):
        ssm_family, of_target, of_ssm = PAIRS[family]
        target = tiny_model(family, seed=0, **of_target)
        ssm = tiny_model(ssm_family, seed=1, num_hidden_layers=1, **of_ssm)
        fit_head(ssm, target)
        models = str(folder / family), str(folder / f"{family}-ssm")
        for model, path in zip((target, ssm), models, strict=True):
            model.save_pretrained(path)
        both = {"params": PARAMS, "prompts": PROMPTS, "max_model_len": LENGTH}
        plain = {**job(models, **both), "plain_v2": True}
        return plain, job(models, {"tree": "4,2,2"}, **both)

    return {family: pair(family) for family in PAIRS}


def run(jobs):
    """Without what vLLM compiles for some models even where the engine is eager."""
    return engine.run(jobs, TORCHDYNAMO_DISABLE="1")


def test_the_text_is_plain_decodings_whatever_the_architectures(jobs):
    results = iter(run([run for of_pair in jobs.values() for run in of_pair]))
    for family, plain, tree in zip(jobs, results, results, strict=True):
        rate = 1 + tree["accepted"] / tree["drafts"]
        print(family, rate, "tokens per step,", tree["branches"], "branches")
        assert tree["tokens"] == plain["tokens"], family
        assert [len(t) for (t,) in tree["tokens"]] == [LENGTH - len(p) for p in PROMPTS]
        assert tree["free_blocks"] == tree["blocks"] - 1, family
        assert rate > 1.2 and tree["branches"] > 10, family


def test_flat_positions_show_where_positions_are_learned(jobs):
    pairs = [jobs[family] for family in ("opt", "gpt2")]
    pairs = [(plain, {**tree, "mutation": "position"}) for plain, tree in pairs]
    results = iter(run([run for pair in pairs for run in pair]))
    for plain, mutant in zip(results, results, strict=True):
        assert mutant["tokens"] != plain["tokens"]
