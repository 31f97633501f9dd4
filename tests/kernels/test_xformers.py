"""xFormers in the place of our kernel, run by Triton's interpreter."""

import pytest
import torch
import tree_attention_cases as cases
import xformers_cases
from interpreter import outputs_of
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_specinfer.attention import xformers


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, list]:
    folder = tmp_path_factory.mktemp("outputs")
    return outputs_of(xformers_cases, folder)


def test_rows_see_their_paths_and_nothing_else_is_written(outputs) -> None:
    steps = list(xformers_cases.steps())
    assert len(outputs[0]) == len(steps)
    for (found, expected), (arguments, _) in zip(outputs[0], steps, strict=True):
        assert expected.isnan().all() != arguments["tree"].is_tree[:-1].any()
        cases.assert_close(found, expected)


def test_layers_attend_trees_chains_and_prefills(outputs) -> None:
    for found, expected in outputs[1]:
        rows = ~expected[:, 0, 0].isnan()
        assert rows.sum() >= 24
        cases.assert_close(found[rows], expected[rows])


def test_layers_with_a_softcap_or_a_window_are_refused() -> None:
    for window, softcap in ((None, 0.7), (64, None)):
        with pytest.raises(ValueError, match="tree_attention must be auto for layers"):
            xformers.XformersImpl(
                2, 64, 0.125, 2, None, window, "auto", logits_soft_cap=softcap
            )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_size": 80}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"has_sink": True}, "sinks not supported"),
    ],
)
def test_the_backend_says_what_it_cannot_run(changed, reason) -> None:
    config = {
        "head_size": 64,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 16,
        "use_mla": False,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }
    reasons = xformers.XformersBackend.validate_configuration(**config | changed)
    assert reasons == [] if reason is None else reason in reasons[0]


def test_no_graph_holds_what_reads_on_the_host() -> None:
    builder = xformers.XformersBackend.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) == AttentionCGSupport.NEVER
