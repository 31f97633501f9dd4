"""Models compiled in pieces and ahead of time, as vLLM does on CUDA, not on a CPU."""

import dataclasses
import os
from unittest import mock

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama


def generate(job: tuple[dict, str]) -> dict:
    """Start an engine that compiles as on CUDA.

    Args:
        job: Its arguments, and vLLM's cache folder.

    Returns:
        Its text, the layers that attended, and how many models were compiled, and found
        compiled.
    """
    from vllm import LLM, SamplingParams
    from vllm.compilation.counter import compilation_counter
    from vllm.config import CompilationMode, VllmConfig
    from vllm.model_executor.layers.attention import attention
    from vllm.platforms.cpu import CpuPlatform

    from vllm_specinfer.kernels.cpu import extension

    llm, folder = job
    processes.hasten_starts()
    extension.load()  # from the usual folder, where it need not be built
    check = CpuPlatform.check_and_update_config
    context, layers = attention.get_attention_context, set()

    def checked(cls: type, vllm_config: VllmConfig) -> None:
        check(vllm_config)
        compilation = vllm_config.compilation_config
        compilation.mode = CompilationMode.VLLM_COMPILE
        compilation.backend, compilation.compile_sizes = "inductor", []
        # They name operators of CUDA's.
        for field in dataclasses.fields(compilation.pass_config):
            if field.name.startswith("fuse_"):
                setattr(compilation.pass_config, field.name, False)

    def attended(layer: str) -> tuple:
        layers.add(layer)
        return context(layer)

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with (
        mock.patch.dict(os.environ, VLLM_CACHE_ROOT=folder),
        mock.patch.object(CpuPlatform, "check_and_update_config", classmethod(checked)),
        mock.patch.object(attention, "get_attention_context", attended),
    ):
        (output,) = LLM(**llm).generate([{"prompt_token_ids": [1, 2, 3]}], params)
    return {
        "tokens": [[output.outputs[0].token_ids]],
        "layers": layers,
        "compiled": compilation_counter.num_aot_compiles,
        "found": compilation_counter.num_aot_artifacts_loaded,
    }


# vLLM's default before torch 2.12, and from then on.
@pytest.mark.parametrize("mega", ["0", "1"])
def test_two_ssms_of_one_model_share_what_is_compiled_and_no_kv_cache(tmp_path, mega):
    target = tiny_llama(tmp_path / "target", seed=0, num_hidden_layers=1)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    plain = engine.tiny(target)
    spec = {
        "method": "specinfer",
        "scheduler": "static",
        "ssms": [{"model": ssm, "tree": "2"}, {"model": ssm, "tree": "1,1,1"}],
    }
    trees = {**plain, "speculative_config": spec}
    job = trees, str(tmp_path / "cache")
    env = {"VLLM_USE_AOT_COMPILE": "1", "VLLM_USE_MEGA_AOT_ARTIFACT": mega}
    first, again = (processes.call(generate, job, **env) for _ in range(2))
    params = [{"temperature": 0, "max_tokens": 24, "ignore_eos": True}]
    eager = {**plain, "enforce_eager": True}
    (expected,) = engine.run([{"llm": eager, "prompts": [[1, 2, 3]], "params": params}])
    assert first["tokens"] == again["tokens"] == expected["tokens"]
    assert (first["compiled"], first["found"]) == (2, 1)
    assert (again["compiled"], again["found"]) == (0, 3)
    assert first["layers"] == again["layers"]
    assert {layer.split(".")[0] for layer in first["layers"]} == {
        *("model", "ssm0", "ssm1")
    }
