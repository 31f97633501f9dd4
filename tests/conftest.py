"""Tiny random model folders; most checks need no more than config.json."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tests run side by side; more threads than cores wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# Torch compiles three programs for each new cache to see that the compiler can.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# How long an example takes depends on who else uses the machine.
hypothesis.settings.register_profile("default_without_deadline", deadline=None)
hypothesis.settings.load_profile("default_without_deadline")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those first of which the longest file is the last one: two workers end alike."""
    items.sort(key=lambda item: "tests/tuning/" not in item.nodeid)


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a folder that holds config.json only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tiny_llama(tmp_path: Path, name: str = "llama", **overrides: Any) -> str:
    """Write a two-layer Llama config and return its folder."""
    return write_model(tmp_path / name, LLAMA | overrides)


def add_weights(folder: Path | str) -> str:
    """Write a file of weights, of no use but whole, and return the folder."""
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"weight": np.zeros(4)}, Path(folder) / "model.safetensors")
    return str(folder)


@pytest.fixture
def make_llama(tmp_path: Path) -> Callable[..., str]:
    """``make_llama("name", vocab_size=...)`` writes a folder below tmp_path."""
    return lambda name="llama", **overrides: tiny_llama(tmp_path, name, **overrides)


@pytest.fixture
def v2_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the next test the model runner of a process without specinfer."""
    from vllm_specinfer.hooks import speculative_config

    # Set first: an absent variable that is deleted is not restored afterwards.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    yield
    speculative_config._switch_runner_off()


@pytest.fixture
def engine_args(make_llama: Callable[..., str], v2_undone: None) -> Callable[..., Any]:
    """``engine_args({"model": ...}, **engine)``: of a tiny target, with specinfer."""
    from vllm import EngineArgs

    def make(config: dict[str, Any], **engine: Any) -> EngineArgs:
        if "model" not in engine:
            engine["model"] = make_llama("target")
        return EngineArgs(
            skip_tokenizer_init=True,
            speculative_config={"method": "specinfer", **config},
            **engine,
        )

    return make


@pytest.fixture
def spec_of(engine_args: Callable[..., Any]) -> Callable[..., Any]:
    """The speculative config of an engine with such arguments; see `engine_args`."""

    def make(config: dict[str, Any], **engine: Any) -> Any:
        return engine_args(config, **engine).create_engine_config().speculative_config

    return make


@pytest.fixture
def refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start an engine config and return the sentence it is refused with."""
    from vllm import EngineArgs
    from vllm.model_executor.models import registry

    # vLLM looks at each architecture in a process of its own.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())

    def start(
        target: dict[str, Any] = LLAMA, ssm: dict[str, Any] = LLAMA, **kwargs: Any
    ) -> str:
        args = EngineArgs(
            model=write_model(tmp_path / "target", target),
            skip_tokenizer_init=True,
            speculative_config={
                "method": "specinfer",
                "model": write_model(tmp_path / "ssm", ssm),
            },
            **kwargs,
        )
        with pytest.raises(ValueError) as error:
            args.create_engine_config()
        sentence = str(error.value)
        assert "\n" not in sentence
        assert " must " in sentence and "; got " in sentence
        return sentence

    return start
