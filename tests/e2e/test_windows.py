"""Sliding windows: the text is that of plain decoding, long behind where they begin."""

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import fit_head, tiny_model
from tests.e2e.test_greedy import GREEDY, job, prompt

WINDOW, POSITIONS = 64, 224
PROMPTS = [prompt(length, length) for length in (1, 33, 100, 150)]
PARAMS = [
    {**GREEDY, "temperature": 0.7 * (i % 2), "seed": i, "max_tokens": POSITIONS}
    for i in range(len(PROMPTS))
]
LONG = {"max_position_embeddings": POSITIONS}
WITH_WINDOW = {**LONG, "sliding_window": WINDOW}
# Target and SSM, and what is special about either. Gemma's layers take turns.
PAIRS = {
    "mistral": ("mistral", {}, WITH_WINDOW),
    "gemma2": ("llama", {"scale": 2}, LONG),
    "gemma3_text": ("mistral", {"scale": 2, "sliding_window_pattern": 2}, WITH_WINDOW),
    # The target's window is not the SSM's.
    "phi3": ("llama", {}, LONG),
    # The SSM's layers take turns, too.
    "gemma2, both": (
        "gemma2",
        {"scale": 2},
        {"num_hidden_layers": 2, **WITH_WINDOW},
    ),
}


def key(family: str, name: str) -> tuple[str, str]:
    """What no SSM takes part in is the target's alone."""
    return family if name in ("tree", "auto") else family.partition(",")[0], name


def jobs(family, folder):
    """Plain decoding and trees, and plain decoding that sees everything."""
    ssm_family, of_target, of_ssm = PAIRS[family]
    ssm = tiny_model(ssm_family, seed=1, **{"num_hidden_layers": 1, **of_ssm})
    ngram = {"model": "ngram", "prompt_lookup_min": 2}
    both = {"params": PARAMS, "prompts": PROMPTS, "max_model_len": POSITIONS}
    paths = [str(folder / f"{family}-{name}") for name in ("target", "ssm", "whole")]
    name = family.partition(",")[0]
    target = tiny_model(name, seed=0, **WITH_WINDOW, **of_target)
    fit_head(ssm, target)
    target.save_pretrained(paths[0])
    ssm.save_pretrained(paths[1])
    target.config.sliding_window = POSITIONS
    target.save_pretrained(paths[2])
    return {
        "plain": {**job(paths[:2], **both), "plain_v2": True},
        "tree": job(paths[:2], {"tree": "4,2,2"}, **both),
        "auto": job(
            paths[:2], {"scheduler": "auto"}, enable_chunked_prefill=True, **both
        ),
        "ngram": job(paths[:2], {"model": None, "ssms": [ngram]}, **both),
        "whole": {**job(paths[2:] + paths[1:2], **both), "plain_v2": True},
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    runs = {
        key(family, name): run
        for family in PAIRS
        for name, run in jobs(family, folder).items()
    }
    found = engine.run(list(runs.values()), TORCHDYNAMO_DISABLE="1")
    return dict(zip(runs, found, strict=True))


@pytest.mark.parametrize("family", PAIRS)
@pytest.mark.parametrize("name", ["tree", "auto", "ngram"])
def test_the_text_is_plain_decodings_behind_a_window(results, family, name):
    plain, found = results[key(family, "plain")], results[key(family, name)]
    assert found["tokens"] == plain["tokens"]
    assert [len(t) for (t,) in plain["tokens"]] == [POSITIONS - len(p) for p in PROMPTS]
    assert found["free_blocks"] == found["blocks"] - 1
    if name in ("auto", "ngram"):
        assert found["drafts"] > 0
    if name == "tree":
        assert found["accepted"] > 0.2 * found["drafts"] and found["branches"] > 10


@pytest.mark.parametrize(
    ("of_target", "of_ssm", "nodes", "least"),
    [
        ({"sliding_window": 32}, {}, 8, 64),
        ({"sliding_window": 64}, {}, 70, 128),
        ({}, {"sliding_window": 32}, 8, 64),
    ],
)
def test_windows_too_small_for_trees_are_refused_at_start_up(
    tmp_path, of_target, of_ssm, nodes, least
):
    paths = [str(tmp_path / name) for name in ("target", "ssm")]
    for path, shape in zip(paths, (of_target, of_ssm), strict=True):
        one_layer = {"num_hidden_layers": 1, "sliding_window": None, **LONG}
        tiny_model("mistral", seed=0, **one_layer | shape).save_pretrained(path)
    config = {"num_speculative_tokens": nodes}
    env = {"VLLM_LOGGING_LEVEL": "ERROR"}
    room = {"max_model_len": POSITIONS, "kv_cache_memory_bytes": engine.KV_BYTES}
    llm = job(paths, config, **room)["llm"]
    sentence = processes.call(refusal_of, llm, **env)
    assert f"sliding windows must hold at least {least} tokens" in sentence


def refusal_of(llm: dict) -> str:
    """What an engine says that does not start."""
    from vllm import LLM

    with pytest.raises(Exception) as error:
        LLM(**llm)
    return str(error.value)


@pytest.mark.parametrize("family", PAIRS)
def test_windows_matter(results, family):
    whole, plain = results[key(family, "whole")], results[key(family, "plain")]
    assert whole["tokens"] != plain["tokens"]
