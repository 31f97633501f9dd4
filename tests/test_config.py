"""Parsing of the user's dictionary and the config object vLLM carries."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest

from tests import vllm_alone
from tests.conftest import add_weights
from vllm_specinfer.options import (
    BestFirstTree,
    ExpansionTree,
    NgramSource,
    SSMSource,
    SuffixSource,
)
from vllm_specinfer.parse_trees import parse_tree
from vllm_specinfer.parsing import parse_options


def test_expansion_counts_the_papers_tree():
    tree = ExpansionTree((1, 1, 3, 1))
    assert tree.level_sizes == (1, 1, 3, 3)
    assert (tree.num_nodes, tree.max_depth) == (8, 4)


@pytest.mark.parametrize("raw", ["1,1,3,1", " 1, 1,3 ,1", "[1,1,3,1]", [1, 1, 3, 1]])
def test_expansion_may_be_a_string_or_a_list(raw):
    assert parse_tree(raw) == ExpansionTree((1, 1, 3, 1))


def test_object_means_best_first_with_defaults():
    assert parse_tree({"max_depth": 6}) == BestFirstTree(max_depth=6, max_width=4)


def test_only_model_is_needed():
    options = parse_options({"method": "specinfer", "model": "org/ssm"})
    assert options.sources[0].model == "org/ssm"
    assert options.tree == BestFirstTree(max_depth=4, max_width=4)
    assert options.num_speculative_tokens == 8
    assert (options.verification, options.scheduler) == ("auto", "auto")


def test_expansion_gives_the_number_of_nodes():
    assert parse_options({"model": "m", "tree": "1,1,3,1"}).num_speculative_tokens == 8
    assert parse_options({"model": "m", "tree": [2, 2]}).num_speculative_tokens == 6


@pytest.mark.parametrize("tree", [{"max_depth": 5, "max_width": 1024}, [1024, 1024, 4]])
def test_trees_have_no_more_candidates_than_draws_can_be_numbered(tree):
    with pytest.raises(ValueError, match="at most 4194303 candidates; got"):
        parse_options({"model": "m", "tree": tree, "num_speculative_tokens": 1024})


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 8, 9, 16, 17, 33])
def test_default_tree_holds_any_number_of_nodes(num_nodes):
    options = parse_options({"model": "m", "num_speculative_tokens": num_nodes})
    assert options.num_speculative_tokens == num_nodes <= options.tree.num_nodes
    assert options.tree.max_depth <= num_nodes


@pytest.mark.parametrize(
    ("tree", "num_nodes"),
    [({"max_depth": 1, "max_width": 3}, 3), ({"max_depth": 9, "max_width": 2}, 9)],
)
def test_best_first_default_fits_its_limits(tree, num_nodes):
    options = parse_options({"model": "m", "tree": tree})
    assert options.num_speculative_tokens == num_nodes


def test_fewer_nodes_than_the_expansion_truncates_and_says_so():
    options = parse_options(
        {"model": "m", "tree": "1,1,3,1", "num_speculative_tokens": 4}
    )
    assert "cuts the last 4 off" in options.truncation_notice
    whole = parse_options({"model": "m", "tree": "1,1,3,1"})
    assert whole.truncation_notice is None


def test_each_ssms_own_expansion_is_truncated_and_lookups_have_none():
    own = {"model": "m", "tree": "1,3", "num_speculative_tokens": 2}
    options = parse_options({"ssms": [own, "n"], "num_speculative_tokens": 8})
    assert "[1, 3] has 4 nodes" in options.truncation_notice
    assert "num_speculative_tokens 2 cuts the last 2" in options.truncation_notice
    lookup = {"model": "ngram", "tree": "1,1,3,1", "num_speculative_tokens": 4}
    assert parse_options(lookup).truncation_notice is None


def test_revision_and_quantization_of_an_ssm_reach_vllm(monkeypatch):
    from vllm_specinfer import config

    asked = {}

    def model_config(**arguments):
        asked.update(arguments)
        raise ValueError("nothing was loaded")

    monkeypatch.setattr(config, "ModelConfig", model_config)
    source = {"model": "m", "revision": "v1", "quantization": "fp8"}
    (ssm,) = parse_options({"ssms": [source]}).ssms
    with pytest.raises(ValueError, match="nothing was loaded"):
        config.build_ssm_model_config(ssm, mock.Mock())
    assert {name: asked[name] for name in source} == source


def test_dashes_in_keys_are_underscores():
    options = parse_options({"model": "m", "num-speculative-tokens": 3})
    assert options.num_speculative_tokens == 3


def test_the_users_dictionary_is_left_alone():
    raw = {"method": "specinfer", "model": "m", "tree": [1, 2]}
    before = copy.deepcopy(raw)
    parse_options(raw)
    assert raw == before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tree": []}, "tree must have at least one level"),
        ({"tree": ""}, "tree must be integers separated by commas"),
        ({"tree": "1,x"}, "tree must be integers separated by commas"),
        ({"tree": [1, 0]}, "tree must be made of positive integers; got 0"),
        ({"tree": "1,-1"}, "tree must be made of positive integers; got -1"),
        ({"tree": [1.5]}, "tree must be made of positive integers; got 1.5"),
        ({"tree": [True]}, "tree must be made of positive integers; got True"),
        ({"tree": 4}, "tree must be an expansion such as"),
        ({"tree": {"depth": 4}}, "tree keys must be among max_depth, max_width"),
        (
            {"tree": {"min_probability": 1.0}},
            r"tree.min_probability must be a number in \[0, 1\); got 1.0",
        ),
        ({"tree": {"max_depth": 0}}, "tree.max_depth must be a positive integer"),
        ({"tree": {"max_width": "4"}}, "tree.max_width must be a positive integer"),
        ({"tree": [1], "num_speculative_tokens": 2}, "at most the tree's 1 nodes"),
        (
            {"tree": {"max_width": 5}, "num_speculative_tokens": 4},
            r"tree.max_width must be at most num_speculative_tokens \(4\); got 5",
        ),
        (
            {"tree": {"max_depth": 5}, "num_speculative_tokens": 4},
            r"tree.max_depth must be at most num_speculative_tokens \(4\); got 5",
        ),
        ({"num_speculative_tokens": 0}, "must be a positive integer; got 0"),
        ({"num_speculative_tokens": "8"}, "must be a positive integer; got '8'"),
        ({"num_speculative_tokens": True}, "must be a positive integer; got True"),
        ({"verification": "best"}, "verification must be one of auto, mss"),
        ({"verification": ["auto"]}, "verification must be one of auto, mss"),
        ({"tree_attention": "flex"}, "must be one of auto, xformers; got 'flex'"),
        ({"scheduler": {"type": "best"}}, "scheduler.type must be one of auto"),
        ({"scheduler": {"typ": 1}}, "scheduler keys must be among type, file; got"),
        (
            {"scheduler": {"type": "static", "file": "f"}},
            "scheduler.type must be 'learned' with a file; got 'static'",
        ),
        ({"scheduler": {"type": "learned", "file": 3}}, "the path of a file; got 3"),
        (
            {"scheduler": {"type": "learned", "file": "/no/file"}},
            "scheduler.file must be what fit-scheduler has written; got '/no/file': "
            "FileNotFoundError",
        ),
        ({"scheduler": 1}, "scheduler must be one of auto, static, learned; got 1"),
        ({"tre": [1]}, "got 'tre', did you mean 'tree'"),
        ({"method": "eagle"}, "method must be 'specinfer'; got 'eagle'"),
        ({"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size must be left"),
        ({"rejection_sample_method": "synthetic"}, "use verification instead"),
        ({"enable_adaptive_verification": True}, "must be left out"),
        ({"prompt_lookup_max": 4}, "must stand beside its model, in ssms: .*; got 4"),
        ({"quantization": "awq"}, "must stand beside its model, in ssms: .*'awq'"),
        ({"model": None}, "model must name an SSM"),
        ({"model": ""}, "model must name a model; got ''"),
        ({"model": 3}, "model must be a string; got 3"),
        ({"model": {"model": "m"}}, "model must be a string"),
        ({"model": "/no/such/folder"}, "existing folder or a hub id; got '/no/such"),
        ({"model": "./ssm"}, "existing folder or a hub id; got './ssm'"),
        ({"ssms": ["a"]}, "model and ssms must not both be given"),
        ({"model": None, "ssms": []}, "ssms must name at least one source; got none"),
        (
            {"model": None, "ssms": ["suffix", {"model": "suffix", "max_tokens": 1}]},
            "must have one 'suffix'; got two with different settings",
        ),
        (
            {"model": None, "ssms": [{"model": "suffix", "max_tokens": -1}]},
            r"ssms\[0\].max_tokens must be an integer of at least 0; got -1",
        ),
        (
            {"model": None, "ssms": [{"model": "suffix", "tree": [1]}]},
            r"ssms\[0\] keys must be among model, max_tokens; got 'tree'",
        ),
        (
            {"model": None, "ssms": [{"model": "ngram", "prompt_lookup_min": 0}]},
            r"ssms\[0\].prompt_lookup_min must be a positive integer; got 0",
        ),
        (
            {
                "model": None,
                "ssms": [
                    {"model": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}
                ],
            },
            "prompt_lookup_min must be at most prompt_lookup_max; got 4 and 2",
        ),
        (
            {"model": None, "ssms": [{"model": "a", "num_speculative_tokens": 0}]},
            r"ssms\[0\].num_speculative_tokens must be a positive integer; got 0",
        ),
        (
            {"model": None, "ssms": [{"model": "a", "tree": []}]},
            "tree must have at least one level",
        ),
        (
            {
                "model": None,
                "ssms": [{"model": "a", "tree": [1, 1]}, {"model": "b", "tree": [2]}],
                "num_speculative_tokens": 5,
            },
            "must be at most the tree's 4 nodes; got 5",
        ),
        ({"model": None, "ssms": "a"}, "ssms must be a list; got 'a'"),
        ({"model": None, "ssms": [3]}, r"ssms\[0\] must be a string or an object"),
        (
            {"model": None, "ssms": [{"model": "a", "revison": "b"}]},
            "did you mean 'revision'",
        ),
        (
            {"model": None, "ssms": [{"model": "a", "revision": 1}]},
            r"ssms\[0\].revision must be a string; got 1",
        ),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(change, sentence):
    raw = {"method": "specinfer", "model": "m"} | change
    with pytest.raises(ValueError, match=sentence) as error:
        parse_options(raw)
    assert "\n" not in str(error.value)


def test_pool_folder_is_resolved_relative_to_its_manifest(tmp_path, make_llama):
    ssm = add_weights(make_llama("pool/ssm0"))
    (tmp_path / "pool/manifest.json").write_text('{"ssms": [{"model": "ssm0"}]}')
    options = parse_options({"model": str(tmp_path / "pool")})
    assert options.sources[0].model == ssm


def test_sources_may_be_several_each_with_its_own_shape():
    options = parse_options(
        {
            "ssms": [
                "a",
                {"model": "b", "tree": "2,1", "num_speculative_tokens": 3},
                "suffix",
                {"model": "ngram", "prompt_lookup_max": 3},
            ],
            "tree": [1, 1, 1],
            "num_speculative_tokens": 12,
        }
    )
    assert options.sources == (
        SSMSource("a"),
        SSMSource("b", tree=ExpansionTree((2, 1)), num_speculative_tokens=3),
        SuffixSource(),
        NgramSource(3, 3),
    )
    assert [ssm.model for ssm in options.ssms] == ["a", "b"]
    assert parse_options({"model": "ngram"}).sources == (NgramSource(5, 5),)


def test_nodes_of_all_sources_add_up_by_default():
    ssms = [{"model": "a", "tree": [1, 2]}, {"model": "b", "tree": [2]}]
    assert parse_options({"ssms": ssms}).num_speculative_tokens == 5


def test_a_pool_may_hold_lookups_beside_ssms(tmp_path, make_llama):
    ssms = [add_weights(make_llama(f"pool/{name}")) for name in "ab"]
    entries = [{"model": "a"}, {"model": "b", "tree": [2]}, {"model": "suffix"}]
    (tmp_path / "pool/manifest.json").write_text(json.dumps({"ssms": entries}))
    options = parse_options({"model": str(tmp_path / "pool")})
    assert [ssm.model for ssm in options.ssms] == ssms
    assert options.ssms[1].tree == ExpansionTree((2,))
    assert options.sources[2] == SuffixSource()
    # A second pool brings the same lookup.
    other = add_weights(make_llama("other/c"))
    entries = [{"model": "c"}, {"model": "suffix"}]
    (tmp_path / "other/manifest.json").write_text(json.dumps({"ssms": entries}))
    pools = [str(tmp_path / name) for name in ("pool", "other")]
    sources = parse_options({"ssms": pools}).sources
    assert [s.name for s in sources if isinstance(s, SuffixSource)] == ["suffix"]
    assert sources[-1].model == other


@pytest.mark.parametrize(
    ("manifest", "sentence"),
    [
        ({"ssms": [{"model": "a", "wieght": 1}]}, r"ssms\[0\] keys must be among"),
        ({"ssms": [{"model": "b"}]}, "must name folders with config.json"),
        ({"ssms": ["a"]}, "must hold"),
        ([], "must hold"),
    ],
)
def test_bad_manifest_is_refused(tmp_path, make_llama, manifest, sentence):
    add_weights(make_llama("pool/a"))
    (tmp_path / "pool/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=sentence):
        parse_options({"model": str(tmp_path / "pool")})


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must be a folder with config.json"):
        parse_options({"model": str(tmp_path)})
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="got a LoRA adapter"):
        parse_options({"model": str(tmp_path)})


@pytest.fixture
def engine_config(make_llama, engine_args):
    # A name that vLLM's own guess would take for an EAGLE head.
    ssm = make_llama("eagle-ssm", max_position_embeddings=512)
    return engine_args({"model": ssm, "tree": "1,1,3,1"}).create_engine_config()


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [[2, 4, 1]],
        [[1, 4, -1]],
        "1-4",
        [[1, None, 2]],
        [["a", 1, 2]],
        [[1, 2.7, 3]],
    ],
)
def test_bad_batch_schedules_are_refused(make_llama, spec_of, schedule):
    config = {
        "model": make_llama("ssm"),
        "num_speculative_tokens_per_batch_size": schedule,
    }
    with pytest.raises(ValueError, match=r"per_batch_size|must start at 1"):
        spec_of(config)


def test_a_schedule_may_be_of_tuples(make_llama, spec_of):
    config = {"model": make_llama("ssm")}
    config["num_speculative_tokens_per_batch_size"] = ((1, 4, 8), (5, 64, 2))
    found = spec_of(config)
    assert len(found.num_speculative_tokens_per_batch_size) == 2


def test_engine_config_carries_everything_the_worker_needs(engine_config):
    from vllm_specinfer.config import SpecInferConfig

    spec = engine_config.speculative_config
    assert isinstance(spec, SpecInferConfig)
    assert spec.method == "draft_model" and spec.uses_draft_model()
    assert spec.options.tree == ExpansionTree((1, 1, 3, 1))
    assert spec.num_speculative_tokens == engine_config.num_lookahead_tokens == 8
    assert engine_config.uniform_decode_query_len == 9
    assert spec.max_num_new_slots_for_drafting == 0
    assert not spec.use_eagle() and not spec.use_eagle_block_drop()
    assert spec.draft_sample_method == "greedy"
    assert spec.draft_model_config.max_model_len == 256
    assert spec.target_parallel_config is engine_config.parallel_config
    assert engine_config.parallel_config.worker_cls == (
        "vllm_specinfer.cpu_worker.SpecInferCPUWorker"
    )
    assert engine_config.scheduler_config.scheduler_cls == (
        "vllm_specinfer.scheduling.async_scheduler.specinfer_scheduler"
    )
    assert engine_config.use_v2_model_runner
    assert "ExpansionTree(widths=(1, 1, 3, 1))" in repr(spec)


@pytest.mark.parametrize("longest", [128, 512])
def test_an_ssm_whose_rope_is_scaled_has_all_its_positions(
    make_llama, spec_of, longest
):
    """vLLM's default for LongRoPE is the length before scaling."""
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    rope |= {f"{kind}_factor": [1.0] * 16 for kind in ("short", "long")}
    ssm = make_llama(
        "ssm",
        max_position_embeddings=longest,
        original_max_position_embeddings=64,  # where vLLM looks for it
        rope_parameters=rope | {"rope_theta": 1e4},
    )
    if longest < 256:
        with pytest.raises(ValueError, match="at most the 128 positions of the SSM"):
            spec_of({"model": ssm})
        return
    spec = spec_of({"model": ssm})
    assert spec.ssm_model_configs[0].max_model_len == 256


@pytest.mark.parametrize(
    ("rope", "longest"), [("linear", 128), ("yarn", 256), ("yarn", 128)]
)
def test_a_head_has_more_positions_where_they_only_size_a_table(
    make_llama, spec_of, tmp_path, rope, longest
):
    target = Path(make_llama("target"))
    about = json.loads((target / "config.json").read_text())
    about |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "max_position_embeddings": longest,
        "rope_parameters": {
            "rope_type": rope,
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(about))
    if rope == "yarn" and longest < 256:
        with pytest.raises(ValueError, match="at most the 128 positions of the SSM"):
            spec_of({"model": str(tmp_path)})
        return
    (head,) = spec_of({"model": str(tmp_path)}).ssm_model_configs
    assert head.hf_config.max_position_embeddings == head.max_model_len == 256


def test_config_survives_copies_and_replace(engine_config):
    from vllm.config.utils import replace

    spec = engine_config.speculative_config
    for copied in (
        pickle.loads(pickle.dumps(spec)),
        cloudpickle.loads(cloudpickle.dumps(spec)),
        copy.deepcopy(spec),
        replace(spec),
        replace(replace(spec)),
    ):
        assert type(copied) is type(spec)
        assert copied.options == spec.options
        assert copied.method == "draft_model"
        assert copied.compute_hash() == spec.compute_hash()


def test_compiled_ssms_are_those_of_the_same_places(engine_config):
    """What vLLM keeps compiled holds the names of layers, and they are numbered."""
    spec = engine_config.speculative_config
    other = copy.copy(spec)
    ssm = spec.options.ssms[0]
    other.options = dataclasses.replace(spec.options, sources=(ssm, ssm))
    assert other.compute_hash() != spec.compute_hash()


def test_compiled_models_are_those_of_the_same_linear_layers(engine_config):
    """What multiplies in them depends on the weights, and compiled code calls it."""
    spec = engine_config.speculative_config
    other = copy.deepcopy(spec)
    other.linear_kernels.append("a kernel")
    assert other.compute_hash() != spec.compute_hash()
    assert not spec.linear_kernels


def test_replace_builds_no_model_config_again(engine_config):
    from vllm.config.utils import replace

    spec = engine_config.speculative_config
    again = replace(spec)
    assert again.draft_model_config is spec.draft_model_config
    assert again.draft_parallel_config is spec.draft_parallel_config
    whole = replace(engine_config, model_config=spec.draft_model_config)
    assert whole.speculative_config is spec


def test_config_unpickles_where_no_plugin_is_loaded(engine_config, tmp_path):
    file = tmp_path / "config.pkl"
    file.write_bytes(pickle.dumps(engine_config))
    code = (
        "import pickle, sys\n"
        "config = pickle.load(open(sys.argv[1], 'rb'))\n"
        "assert config.speculative_config.options.tree.num_nodes == 8\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "hook = EngineArgs.create_speculative_config\n"
        "assert hook.__module__ == 'vllm.engine.arg_utils'\n"
        "assert not hasattr(hook, '_specinfer_original')\n"
    )
    vllm_alone.run(code, file)


def test_a_second_config_from_the_same_arguments_is_the_same(make_llama, engine_args):
    args = engine_args({"model": make_llama("ssm")})
    first = args.create_engine_config().speculative_config
    second = args.create_engine_config().speculative_config
    assert first.options == second.options


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (
            {"max_depth": 2, "max_width": 7},
            "max_width=7, min_probability=0.05), at most",
        ),
        ([2, 1], "ExpansionTree(widths=(2, 1)), at most 4 nodes, all in every step"),
    ],
)
def test_the_tree_of_an_ssms_own_is_the_one_that_counts(
    make_llama, spec_of, tree, said
):
    ssms = [{"model": make_llama("ssm"), "tree": tree}]
    assert said in spec_of({"ssms": ssms}).summary


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "as many as pay"),
        ({"verification": "naive"}, "as many as pay"),
        ({"scheduler": "learned"}, "as many as pay by learned chances"),
        (
            {"scheduler": "learned", "verification": "rrs"},
            "because a seeded text under 'rrs' depends",
        ),
        ({"scheduler": "static"}, "all in every step, because the scheduler is"),
        ({"tree": [2, 1]}, "because the tree is an expansion"),
        ({"verification": "mss"}, "because a seeded text under 'mss' depends"),
    ],
)
def test_nodes_follow_the_load_where_the_text_cannot_tell(
    make_llama, spec_of, options, said
):
    spec = spec_of({"model": make_llama("ssm"), **options})
    assert spec.follows_load is ("as many as pay" in said) and said in spec.summary


def test_metrics_and_log_name_the_sources_lookups_first(make_llama, spec_of):
    one, other = make_llama("one"), make_llama("other")
    spec = spec_of({"ssms": [one, "suffix", other, "ngram"]})
    assert spec.source_names == ("suffix", "ngram", "ssm0", "ssm1")
    said = f"sources suffix, ngram, ssm0 ({one}), ssm1 ({other}); BestFirstTree("
    assert spec.summary.startswith(said)
    assert spec.summary.endswith(
        "at most 8 nodes, as many as pay; verification coupled"
    )
