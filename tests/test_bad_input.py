"""What is wrong with the input is said in one sentence, and nothing else happens."""

import json
import os
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import add_weights
from vllm_specinfer import options
from vllm_specinfer.parsing import MAX_MESSAGE, parse_options

NAMES = ("model", "ssms", "num_speculative_tokens", "tree", "verification", "scheduler")
NAMES += ("tree_attention",)
INNER = ("max_depth", "max_width", "min_probability", "type", "revision", "max_tokens")
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 40)
    | st.floats()
    | st.text()
    | st.sampled_from(("ngram", "suffix", "org/ssm", "1,1,3,1", "auto", "~nobody/x"))
)
KEYS = st.sampled_from(NAMES + INNER) | st.text() | st.integers()
VALUES = st.recursive(
    SCALARS,
    lambda v: (
        st.lists(v, max_size=4) | st.tuples(v, v) | st.dictionaries(KEYS, v, max_size=4)
    ),
    max_leaves=12,
)
TREES = (
    st.lists(st.integers(-1, 5000), max_size=6)
    | st.lists(st.integers(0, 40), max_size=6).map(lambda t: ",".join(map(str, t)))
    | st.dictionaries(st.sampled_from(INNER[:3]), SCALARS)
    | VALUES
)
CONFIGS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(("m", "ngram")) | VALUES,
        "ssms": st.lists(VALUES, max_size=3) | VALUES,
        "tree": TREES,
        "num_speculative_tokens": st.integers(-1, 3000) | VALUES,
        "verification": st.sampled_from(options.VERIFICATIONS) | VALUES,
        "scheduler": st.sampled_from(options.SCHEDULERS) | VALUES,
        "tree_attention": st.sampled_from(options.TREE_ATTENTIONS) | VALUES,
    },
)


def sentence(raw):
    """What a configuration is refused with."""
    with pytest.raises(ValueError) as error:
        parse_options(raw)
    text = str(error.value)
    assert " must " in text and "; got " in text, text
    assert "\n" not in text and len(text) <= MAX_MESSAGE + len(" ... ")
    return text


@settings(max_examples=400)
@given(CONFIGS | st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_configuration_is_parsed_or_refused_in_one_sentence(raw):
    try:
        parsed = parse_options(raw)
    except ValueError:
        sentence(raw)
        return
    assert 1 <= parsed.num_speculative_tokens <= options.MAX_NUM_SPECULATIVE_TOKENS
    assert parsed.sources
    assert parse_options(raw) == parsed


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        ({"model": "m", "num_speculative_tokens": 10**9}, "at most 1024; got 10000000"),
        (
            {"ssms": [{"model": "m", "num_speculative_tokens": 10**9}, "suffix"]},
            "ssms[0].num_speculative_tokens must be at most 1024; got 1000000000",
        ),
        ({"model": "m", "tree": [2] * 11}, "num_speculative_tokens must be at most"),
        ({"model": "m", "tree": [1] * 10**6}, "at most 1024 levels; got 1000000"),
        ({"model": "m", "tree": [1, 10**9]}, "integers of at most 1024; got 100000000"),
        ({"model": "m", "tree": "9" * 5000}, "must be integers separated by commas"),
        (
            {"model": "m", "tree": {"max_depth": 40, "max_width": 10**9}},
            "num_speculative_tokens must be at most",
        ),
        (
            {"model": "m", "tree": {"min_probability": float("nan")}},
            "must be a number in [0, 1); got nan",
        ),
        ({"model": "m", "tree": {"min_probability": False}}, "got False"),
        ({"model": "m", "tree": nested(100_000)}, "fewer levels"),
        ({"model": "x" * 10**6}, "existing folder or a hub id; got 'xxx"),
        ({"model": "a\0b"}, "existing folder or a hub id; got 'a\\x00b'"),
        ({"model": "\ud800"}, "existing folder or a hub id"),
        ({"model": "~nobody/ssm"}, "existing folder or a hub id; got '~nobody"),
        (
            {"model": "m", "num_speculative_tokens": 3, "num-speculative-tokens": 4},
            "num_speculative_tokens must be given once",
        ),
        ({"model": "m", 3: 4}, "got '3'"),
    ],
)
def test_what_the_sentence_says(raw, part):
    assert part in sentence(raw)


@pytest.fixture
def pool(tmp_path, make_llama):
    """A pool that loads, and how to read it."""
    add_weights(make_llama("pool/ssm0"))
    write_manifest(tmp_path / "pool", [{"model": "ssm0"}])
    assert parse_options({"model": str(tmp_path / "pool")}).sources
    return tmp_path / "pool"


def write_manifest(pool, entries):
    (pool / "manifest.json").write_text(json.dumps({"ssms": entries}))


class Touch:
    """Unpickled, it leaves a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def missing_shard(pool):
    (pool / "ssm0/model.safetensors.index.json").write_text(
        json.dumps(
            {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
        )
    )


def shard_elsewhere(pool):
    add_weights(pool)
    (pool / "ssm0/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../model.safetensors"}})
    )


def truncated(pool):
    file = pool / "ssm0/model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def corrupt(pool):
    (pool / "ssm0/model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{")


def pickled(pool):
    weights = pickle.dumps(Touch(pool / "touched"))
    (pool / "ssm0/pytorch_model.bin").write_bytes(weights)


def outside(pool):
    os.rename(pool / "ssm0", pool.parent / "ssm0")
    write_manifest(pool, [{"model": "../ssm0"}])


def absolute(pool):
    os.rename(pool / "ssm0", pool.parent / "ssm0")
    write_manifest(pool, [{"model": str(pool.parent / "ssm0")}])


def linked_folder(pool):
    outside(pool)
    (pool / "ssm0").symlink_to(pool.parent / "ssm0")
    write_manifest(pool, [{"model": "ssm0"}])


def linked_file(pool):
    os.rename(pool / "ssm0/model.safetensors", pool.parent / "weights")
    (pool / "ssm0/model.safetensors").symlink_to(pool.parent / "weights")


def pool_in_itself(pool):
    (pool / "config.json").write_text((pool / "ssm0/config.json").read_text())
    write_manifest(pool, [{"model": "."}])


def pool_in_a_pool(pool):
    write_manifest(pool / "ssm0", [{"model": "../ssm0"}])


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (missing_shard, "must hold every shard of its model.safetensors.index.json"),
        (shard_elsewhere, "got none of the name '../model.safetensors'"),
        (truncated, "must be a whole safetensors file"),
        (corrupt, "must be a whole safetensors file"),
        (pickled, "a pickle can run code; got pytorch_model.bin"),
        (lambda pool: os.remove(pool / "ssm0/model.safetensors"), "got none"),
        (outside, "must name models inside its folder; got"),
        (absolute, "must name models inside its folder; got"),
        (linked_folder, "must name models inside its folder; got"),
        (linked_file, "must name models inside its folder; got"),
        (pool_in_itself, "must name models inside its folder; got"),
        (pool_in_a_pool, "must name models inside its folder; got"),
        (lambda pool: (pool / "manifest.json").write_text("ssm0"), "must be JSON"),
        (lambda pool: (pool / "manifest.json").write_bytes(b"\xff"), "must be JSON"),
        (
            lambda pool: (pool / "manifest.json").write_text("[" * 10**5),
            "must be JSON",
        ),
    ],
)
def test_a_bad_pool_is_refused_and_nothing_of_it_is_run(pool, change, part):
    change(pool)
    assert part in sentence({"model": str(pool)})
    assert not (pool / "touched").exists()


def test_a_pool_in_hugging_faces_cache_may_link_to_its_blobs(pool):
    cache = pool.parent / "models--org--pool"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    os.rename(pool, cache / "snapshots/revision")
    weights = cache / "snapshots/revision/ssm0/model.safetensors"
    os.rename(weights, cache / "blobs/hash")
    weights.symlink_to("../../../blobs/hash")
    assert parse_options({"model": str(cache / "snapshots/revision")}).sources


def test_broken_weights_outside_a_pool_are_refused_too(make_llama):
    folder = make_llama("ssm")
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(b"no weights")
    assert "must be a whole safetensors file" in sentence({"model": folder})


CODE = """
from transformers import PretrainedConfig
open({marker!r}, "w").close()

class Config(PretrainedConfig):
    model_type = "mine"
"""


def test_code_of_a_pool_is_not_run_without_trust(pool, engine_args):
    marker = pool.parent / "ran"
    (pool / "ssm0/configuration_mine.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((pool / "ssm0/config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "configuration_mine.Config"},
    }
    (pool / "ssm0/config.json").write_text(json.dumps(config))
    args = engine_args({"model": str(pool)})
    with pytest.raises(ValueError, match="model must be an SSM that vLLM can load"):
        args.create_engine_config()
    assert not marker.exists()
    args.trust_remote_code = True
    args.create_engine_config()
    assert marker.exists()
