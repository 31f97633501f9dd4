"""Every refusal is one sentence at start-up, before any weight is read."""

from types import SimpleNamespace

import pytest
import torch
from vllm import envs
from vllm.config import StructuredOutputsConfig

from tests.conftest import LLAMA
from vllm_specinfer import refusals

ENFORCER = "lm-format-enforcer"

pytestmark = pytest.mark.usefixtures("v2_undone")


def test_the_v1_runner_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "the V1 runner would draft a chain; got 0" in refusal()


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        (
            {"data_parallel_size": 2, "enable_expert_parallel": True},
            "data_parallel_size must be 1 for a mixture of experts",
        ),
        ({"enable_dbo": True}, "enable_dbo and ubatch_size must be left out"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype must be one of auto, bfloat16"),
        ({"kv_cache_dtype": "nvfp4"}, "this CPU with method specinfer; got 'nvfp4'"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size must be left out"),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling must"),
        ({"watermark_config": {}}, "watermark_config must be left out"),
        ({"diffusion_config": {}}, "diffusion_config must be left out"),
        ({"return_sampling_mask": True}, "return_sampling_mask must be left out"),
        ({"use_fp64_gumbel": True}, "use_fp64_gumbel must be left out"),
        (
            {"structured_outputs_config": StructuredOutputsConfig(backend=ENFORCER)},
            "structured_outputs_config.backend must be auto, xgrammar",
        ),
        (
            {"enable_return_routed_experts": True},
            "enable_return_routed_experts must be left out",
        ),
        ({"enable_trace_replay": True}, "enable_trace_replay must be left out"),
        ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill must be left out"),
    ],
)
def test_features_that_break_trees_are_refused(refusal, kwargs, sentence):
    assert sentence in refusal(**kwargs)


def test_a_kv_connector_is_refused(refusal):
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert "kv_transfer_config must be left out" in refusal(
        kv_transfer_config=connector
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1"),
        (
            {"prefill_context_parallel_size": 2},
            "prefill_context_parallel_size must be 1",
        ),
        ({"enable_eplb": True}, "enable_eplb must be left out"),
        ({"data_parallel_size": 2}, None),
    ],
)
def test_parallel_layouts_that_need_many_devices_are_judged(change, sentence):
    reason = refusals.parallel_reason(layout(change), SimpleNamespace(is_moe=False))
    assert (reason is None) if sentence is None else (sentence in reason)


def layout(change):
    """A config of one device, but for these changes."""
    return SimpleNamespace(
        **{
            "distributed_executor_backend": "mp",
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
            "use_ubatching": False,
            "num_ubatches": 0,
            "enable_eplb": False,
            "enable_batch_sharded_sampling": None,
        }
        | change
    )


@pytest.mark.parametrize(
    ("backend", "newer", "refused"),
    [("ray", "0", True), ("ray", "1", False), ("ray", None, False), ("mp", "0", False)],
)
def test_an_executor_that_goes_past_the_worker_is_refused(
    monkeypatch, backend, newer, refused
):
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    monkeypatch.delenv(name, raising=False)
    if newer is not None:
        monkeypatch.setenv(name, newer)
    parallel = layout({"distributed_executor_backend": backend})
    reason = refusals.parallel_reason(parallel, SimpleNamespace(is_moe=False))
    # vLLM 0.33 has no such executor.
    if refused and hasattr(envs, name):
        assert f"{name} must be 1 or unset" in reason and reason.endswith("got 0")
    else:
        assert reason is None


FP8_KV = {
    "quantization_config": {
        **{"quant_method": "compressed-tensors", "config_groups": {}},
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    }
}


def test_a_checkpoint_that_turns_the_ssms_cache_alone_into_fp8_is_refused(refusal):
    sentence = refusal(ssm=LLAMA | FP8_KV)
    assert "kv_cache_dtype must be set" in sentence and "/ssm'" in sentence


def test_the_same_type_of_cache_is_accepted_for_an_ssm_with_a_scheme():
    plain, fp8 = (
        SimpleNamespace(model="m", model_arch_config=SimpleNamespace(**config))
        for config in ({"quantization_config": None}, FP8_KV)
    )
    assert refusals.checkpoint_cache_reason("auto", plain, [plain, fp8]) is not None
    assert refusals.checkpoint_cache_reason("fp8", plain, [plain, fp8]) is None
    assert refusals.checkpoint_cache_reason("auto", fp8, [plain, fp8]) is None


def test_fp8_kv_needs_what_vllms_kernels_need(monkeypatch):
    plain, fp8 = (
        SimpleNamespace(
            model_arch_config=SimpleNamespace(**config), dtype=torch.bfloat16
        )
        for config in ({"quantization_config": None}, FP8_KV)
    )
    cases = [("fp8", plain), ("fp8_e5m2", plain), ("auto", fp8), ("auto", plain)]

    def refused(is_cpu, avx512=True):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
            return [
                refusals.cache_dtype_reason(*case, is_cpu) is not None for case in cases
            ]

    assert refused(is_cpu=True) == [False, False, False, False]
    assert refused(is_cpu=True, avx512=False) == [True, True, True, False]
    assert refused(is_cpu=False) == [False, True, False, False]
    # 16 bits are the target's own, or none.
    float32 = SimpleNamespace(**{**vars(plain), "dtype": torch.float32})
    cases = [("bfloat16", plain), ("float16", plain), ("bfloat16", float32)]
    assert refused(is_cpu=True) == refused(is_cpu=False) == [False, True, True]


@pytest.fixture
def vllm_config(make_llama, engine_args):
    # As in a CPU worker, where it must precede every import of worker.gpu.
    import vllm.v1.worker.cpu.shm  # noqa: F401

    return engine_args({"model": make_llama("ssm")}).create_engine_config()


def test_the_worker_accepts_what_the_front_end_accepted(vllm_config):
    refusals.check_vllm_config(vllm_config)


def test_the_worker_refuses_a_config_changed_since(vllm_config, monkeypatch):
    vllm_config.cache_config.cache_dtype = "nvfp4"
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of"):
        refusals.check_vllm_config(vllm_config)
    vllm_config.cache_config.cache_dtype = "auto"
    (ssm,) = vllm_config.speculative_config.ssm_model_configs
    ssm.model_arch_config.quantization_config = FP8_KV["quantization_config"]
    with pytest.raises(ValueError, match="kv_cache_scheme"):
        refusals.check_vllm_config(vllm_config)
    vllm_config.cache_config.cache_dtype = "auto"
    with monkeypatch.context() as env:
        env.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        with pytest.raises(ValueError, match="V1 runner would draft a chain"):
            refusals.check_vllm_config(vllm_config)
    vllm_config.speculative_config = None
    with pytest.raises(
        ValueError, match="must be a SpecInferConfig for this worker; got NoneType"
    ):
        refusals.check_vllm_config(vllm_config)
