"""The CUDA backend without a GPU: what it builds, refuses and, interpreted, attends."""

import cuda_backend_cases as backend
import pytest
import torch
import tree_attention_cases as cases
from interpreter import outputs_of
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from vllm_specinfer.attention import cuda


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list, ...]:
    return outputs_of(backend, tmp_path_factory.mktemp("outputs"))


def test_trees_chains_and_prefills_of_a_step_get_their_attention(outputs) -> None:
    for found, expected in outputs[0]:
        rows = ~expected[:, 0, 0].isnan()
        assert rows.sum() >= 24
        cases.assert_close(found[rows], expected[rows])


def test_a_graph_finds_the_trees_of_every_step(outputs) -> None:
    for found, expected in outputs[1]:
        cases.assert_close(found, expected)
    (trees, _), (none, _), (one, _) = outputs[1]
    assert trees[:9].equal(one[:9]) and not trees[:9].equal(none[:9])
    assert none[12:24].equal(one[12:24]) and not trees[12:24].equal(none[12:24])


def test_a_graph_of_few_rows_serves_every_step(outputs) -> None:
    for found, expected in outputs[2]:
        cases.assert_close(found, expected)


def test_a_step_without_trees_is_the_stock_step() -> None:
    step = cases.step(backend.SMALL, words=1)
    builder = backend.make_builder(step["kv_cache"], torch.float32, 4)
    metadata = builder.build(0, backend.common_metadata(step))
    assert type(metadata) is TritonAttentionMetadata


def test_graphs_with_more_rows_than_a_tree_are_the_stock_ones() -> None:
    step = cases.step(backend.WITH_PREFILL, words=1)
    builder = backend.make_builder(step["kv_cache"], torch.float32, 4)
    metadata = builder.build_for_cudagraph_capture(backend.common_metadata(step))
    assert type(metadata) is TritonAttentionMetadata


def test_bit_rows_of_another_width_are_refused() -> None:
    step = cases.step(backend.SMALL, words=2)
    builder = backend.make_builder(step["kv_cache"], torch.float32, 4)
    with pytest.raises(ValueError, match="must have 1 words per row; got 2"):
        builder.build(0, backend.common_metadata(step), tree=step["tree"])


def test_blocks_of_rows_are_those_of_the_layers(outputs) -> None:
    found, expected = zip(*outputs[3], strict=True)
    assert found == expected and len(set(found)) > 1


def test_layers_with_alibi_are_refused() -> None:
    with pytest.raises(ValueError, match="neither ALiBi nor chunks"):
        cuda.CUDATreeAttentionImpl(2, 64, 0.125, 2, [0.5, 0.25], None, "auto")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"head_size": 288}, "head_size not supported"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype not supported"),
        ({"device_capability": DeviceCapability(8, 0)}, None),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention"),
    ],
)
def test_the_backend_says_what_it_cannot_run(changed, reason) -> None:
    config = {
        "head_size": 80,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8",
        "block_size": 16,
        "use_mla": False,
        "has_sink": True,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": True,
    }
    reasons = cuda.CUDATreeAttentionBackend.validate_configuration(**config | changed)
    assert reasons == [] if reason is None else reason in reasons[0]


def test_register_fills_the_custom_backend_and_may_run_twice() -> None:
    try:
        cuda.register()
        cuda.register()
        backend = AttentionBackendEnum.CUSTOM.get_class()
        assert backend is cuda.CUDATreeAttentionBackend
        assert AttentionBackendEnum[backend.get_name()] is AttentionBackendEnum.CUSTOM
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()
