"""What an engine on CUDA is refused and started with, on a double of the platform."""

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import vllm_alone
from vllm_specinfer import refusals
from vllm_specinfer.hooks import speculative_config

pytestmark = pytest.mark.usefixtures("v2_undone")
# Of each worker, in a fork of its own, what it imports of another one's.
IMPORTS = """
import importlib, sys
own, attention, *others = sys.argv[1:]
for name in (f"{own}_worker", "speculator", f"attention.{attention}"):
    importlib.import_module(f"vllm_specinfer.{name}")
print(*(name for name in sys.modules if name.startswith(tuple(others))))
"""


@pytest.fixture
def on_cuda(monkeypatch):
    """A platform that says it is CUDA, with the experiment switched on."""
    from vllm.platforms import current_platform

    monkeypatch.setenv(refusals.CUDA_ENV, "1")
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)


@pytest.fixture
def create(make_llama, monkeypatch):
    """Make the speculative config of engine arguments, as EngineArgs does."""
    from vllm import EngineArgs
    from vllm.config import ParallelConfig

    monkeypatch.setattr(speculative_config, "_switch_runner_on", lambda: None)
    target, ssm = make_llama("target"), make_llama("ssm")

    def make(args=None, **kwargs):
        args = args or EngineArgs(
            model=target,
            skip_tokenizer_init=True,
            speculative_config={"method": "specinfer", "model": ssm},
            **kwargs,
        )
        model = EngineArgs(model=target, skip_tokenizer_init=True).create_model_config()
        parallel = ParallelConfig()
        speculative_config._create(args, model, parallel)
        return args, parallel

    return make


def test_cuda_is_an_experiment_that_must_be_switched_on(on_cuda, create, monkeypatch):
    for value in ("0", None):
        if value is None:
            monkeypatch.delenv(refusals.CUDA_ENV)
        else:
            monkeypatch.setenv(refusals.CUDA_ENV, value)
        with pytest.raises(ValueError, match="VLLM_SPECINFER_CUDA must be 1"):
            create()


def test_another_platform_is_refused_whatever_is_switched_on(on_cuda, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: False)
    assert refusals.device_reason().startswith("the platform must be a CPU, or CUDA")


def test_a_cpu_needs_no_switch_and_keeps_its_arguments(create):
    args, parallel = create()
    assert parallel.worker_cls == "vllm_specinfer.cpu_worker.SpecInferCPUWorker"
    assert args.async_scheduling is None and args.attention_backend is None
    assert args.compilation_config.cudagraph_mode is None


def test_cuda_gets_tree_attention_and_vllms_defaults_otherwise(on_cuda, create):
    args, parallel = create()
    assert parallel.worker_cls == "vllm_specinfer.gpu_worker.SpecInferGPUWorker"
    assert args.scheduler_cls == speculative_config.SCHEDULER
    assert args.attention_backend == "CUSTOM"
    # That is to schedule asynchronously and to capture graphs.
    assert args.async_scheduling is None
    assert args.compilation_config.cudagraph_mode is None
    # The same arguments serve a second engine.
    again, _ = create(args)
    assert again.attention_backend == "CUSTOM"


def test_vllm_makes_graphs_and_asynchronous_scheduling_of_it(make_llama):
    models = make_llama("target"), make_llama("ssm")
    run = subprocess.run(
        [sys.executable, "-m", "tests.cuda_front_end", *models],
        env=os.environ | {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    sizes = found.pop("capture_sizes")
    # Whole trees of 8 nodes, and single tokens.
    assert {1, 2, 4, 9, 18, 36} <= set(sizes)
    assert found == {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "async_scheduling": True,
        "scheduler_cls": speculative_config.SCHEDULER,
        "worker_cls": "vllm_specinfer.gpu_worker.SpecInferGPUWorker",
        "v2": True,
        "backends": ["CUDATreeAttentionBackend"] * 2,
    }


def test_a_backend_that_vllm_is_to_choose_is_left_out(on_cuda, create):
    args, _ = create(attention_backend="auto")
    assert args.attention_backend == "CUSTOM"


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        (
            {"attention_backend": "FLASH_ATTN"},
            "attention_backend must be left out .* got FLASH_ATTN",
        ),
        (
            {"attention_config": {"backend": "TRITON_ATTN"}},
            r"attention_config\.backend must be left out .* got TRITON_ATTN",
        ),
        (
            {
                "attention_config": {
                    "backend_per_kind": {"full_attention": "FLASHINFER"}
                }
            },
            "backend_per_kind must be left out",
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of"),
    ],
)
def test_what_stands_in_the_way_is_refused_by_name(on_cuda, create, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        create(**kwargs)


def test_xformers_is_refused_where_it_cannot_run(monkeypatch, on_cuda):
    assert refusals.tree_attention_reason("auto") is None
    assert refusals.tree_attention_reason("xformers") is None
    monkeypatch.setitem(sys.modules, "xformers.ops.tree_attention", None)
    reason = refusals.tree_attention_reason("xformers")
    assert "must be auto without a working xformers" in reason


def test_xformers_is_refused_on_a_cpu(create, make_llama):
    from vllm import EngineArgs

    spec = {"method": "specinfer", "model": make_llama("ssm")}
    args = EngineArgs(
        model=make_llama("target"),
        skip_tokenizer_init=True,
        speculative_config={**spec, "tree_attention": "xformers"},
    )
    with pytest.raises(ValueError, match="must be auto on a CPU; got xformers"):
        create(args)


@pytest.mark.parametrize(
    ("choice", "name"),
    [("auto", "CUDATreeAttentionBackend"), ("xformers", "XformersBackend")],
)
def test_the_worker_registers_the_chosen_attention(choice, name):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from vllm_specinfer.gpu_worker import SpecInferGPUWorker

    options = SimpleNamespace(tree_attention=choice)
    worker = SpecInferGPUWorker.__new__(SpecInferGPUWorker)
    worker.vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(options=options)
    )
    try:
        worker.register_attention()
        assert AttentionBackendEnum.CUSTOM.get_class().__name__ == name
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_a_device_that_cannot_read_the_hosts_memory_is_refused(monkeypatch):
    from vllm_specinfer import gpu_worker

    worker = gpu_worker.SpecInferGPUWorker.__new__(gpu_worker.SpecInferGPUWorker)
    monkeypatch.setattr(gpu_worker, "is_uva_available", lambda: False)
    with pytest.raises(ValueError, match="pinned host memory must be available"):
        worker.init_device()


def test_a_sleep_that_loses_weights_keeps_those_of_ssms(monkeypatch):
    """vLLM reloads only the target's."""
    from vllm_specinfer import gpu_worker
    from vllm_specinfer.worker import TreeWorker

    worker = gpu_worker.SpecInferGPUWorker.__new__(gpu_worker.SpecInferGPUWorker)
    kept = ["lm_head.*"]
    worker.model_config = SimpleNamespace(sleep_preserve_parameter_names=kept)
    monkeypatch.setattr(gpu_worker, "is_uva_available", lambda: True)
    monkeypatch.setattr(TreeWorker, "init_device", lambda self: None)
    for _ in range(2):
        worker.init_device()
    assert kept == ["lm_head.*", "draft.*"]
    worker.get_draft_model = lambda: torch.nn.Linear(1, 1)
    names = worker._get_sleep_parameters(torch.nn.Linear(1, 1))
    assert fnmatch.filter(names, kept[1]) == ["draft.weight", "draft.bias"]


def test_a_refusal_leaves_the_arguments_as_they_were(on_cuda, create, make_llama):
    from vllm import EngineArgs

    args = EngineArgs(
        model=make_llama("target"),
        kv_cache_dtype="fp8_e5m2",
        speculative_config={"method": "specinfer", "model": make_llama("ssm")},
    )
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        create(args)
    assert args.attention_backend is None and args.scheduler_cls is None
    assert args.compilation_config.cudagraph_mode is None


@pytest.mark.parametrize(
    ("backend", "rows", "sentence"),
    [
        ("CUSTOM", 10, None),
        (None, 10, "the attention backend must be CUSTOM"),
        ("FLASH_ATTN", 10, "got FLASH_ATTN"),
        # vLLM's warm-up has no request then, and asks for the first.
        ("CUSTOM", 9, "max_num_batched_tokens must be at least 10 with 8 num_spec"),
    ],
)
def test_the_worker_refuses_what_no_step_could_run(backend, rows, sentence):
    config = SimpleNamespace(
        attention_config=SimpleNamespace(
            backend=backend and SimpleNamespace(name=backend)
        ),
        speculative_config=SimpleNamespace(num_speculative_tokens=8),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=rows),
    )
    reason = refusals._cuda_reason(config)
    assert reason is None if sentence is None else sentence in reason


def test_a_worker_imports_nothing_of_the_other_device():
    of_cpu = ("vllm_specinfer.kernels.cpu", "vllm_specinfer.cpu_worker")
    of_cpu += ("vllm_specinfer.attention.cpu", "vllm_specinfer.hooks.cpu_v2")
    of_cpu += ("vllm_specinfer.commit.compaction",)
    of_cuda = ("vllm_specinfer.kernels.triton", "vllm_specinfer.gpu_worker")
    of_cuda += ("vllm_specinfer.attention.cuda",)
    for own, attention, others in (("gpu", "cuda", of_cpu), ("cpu", "cpu", of_cuda)):
        found = vllm_alone.run(IMPORTS, own, attention, *others, VLLM_PLUGINS="")
        assert found == "\n"
