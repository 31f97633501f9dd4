"""Targets and SSMs of many families: the text is that of plain decoding."""

import pytest

from tests.e2e import engine
from tests.e2e.models import fit_head, tiny_model
from tests.e2e.test_greedy import GREEDY, job, prompt

# Of `tiny_model`; every text goes on to the last of them.
POSITIONS = 96
PROMPTS = [prompt(length, length) for length in (1, 3, 17, 33, 64)]
PARAMS = [
    {**GREEDY, "temperature": 0.7 * (i % 2), "seed": i, "max_tokens": POSITIONS}
    for i in range(len(PROMPTS))
]
# As OPT-350M: the embedding is narrower than the layers, norms come after them.
NARROW_OPT = {"word_embed_proj_dim": 64, "do_layer_norm_before": False}
# The last two layers read K/V of others; layers differ in kind, and so does the SSM's.
SHARED_KV = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 64,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 6,
}
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
    "gemma3n_text": ("llama", SHARED_KV, {"head_dim": 64}),
}


# The first two learn a vector for each position, the third rotates by it.
WRONG_POSITIONS = ("opt", "gpt2", "phi")


def jobs(family, folder):
    """Plain decoding and trees."""
    ssm_family, of_target, of_ssm = PAIRS[family]
    target = tiny_model(family, seed=0, **of_target)
    ssm = tiny_model(ssm_family, seed=1, num_hidden_layers=1, **of_ssm)
    fit_head(ssm, target)
    models = str(folder / family), str(folder / f"{family}-ssm")
    for model, path in zip((target, ssm), models, strict=True):
        model.save_pretrained(path)
    both = {"params": PARAMS, "prompts": PROMPTS, "max_model_len": POSITIONS}
    plain = {**job(models, **both), "plain_v2": True}
    return plain, job(models, {"tree": "4,2,2"}, **both)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of plain decoding, trees and trees with flat positions, by the target's family.

    Without what vLLM compiles for some models even where the engine is eager.
    """
    folder = tmp_path_factory.mktemp("models")
    runs = {}
    for family in PAIRS:
        runs[family, "plain"], runs[family, "tree"] = jobs(family, folder)
    for family in WRONG_POSITIONS:
        runs[family, "flat"] = {**runs[family, "tree"], "mutation": "position"}
    runs["gemma3n_text", "tree"]["profiles"] = True
    found = engine.run(list(runs.values()), TORCHDYNAMO_DISABLE="1")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("family", PAIRS)
def test_the_text_is_plain_decodings_whatever_the_architectures(results, family):
    plain, tree = results[family, "plain"], results[family, "tree"]
    rate = 1 + tree["accepted"] / tree["drafts"]
    print(family, rate, "tokens per step,", tree["branches"], "branches")
    assert tree["tokens"] == plain["tokens"]
    assert [len(t) for (t,) in tree["tokens"]] == [POSITIONS - len(p) for p in PROMPTS]
    assert tree["free_blocks"] == tree["blocks"] - 1
    assert rate > 1.2 and tree["branches"] > 10


@pytest.mark.parametrize("family", WRONG_POSITIONS)
def test_flat_positions_show(results, family):
    assert results[family, "flat"]["tokens"] != results[family, "plain"]["tokens"]


def test_layers_that_share_kv_have_graphs(results):
    layers = results["gemma3n_text", "tree"]["layers"]
    assert len(set(layers)) == SHARED_KV["num_hidden_layers"] + 1  # the SSM's
