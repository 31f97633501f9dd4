"""An engine that is shut down lets go of its models while somebody still has it."""

import gc
import weakref
from pathlib import Path

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama


def test_models_are_gone_after_a_shutdown(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", seed=0)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    # In a process of its own: `hasten_starts` keeps vLLM from freezing what it holds.
    env = {"VLLM_LOGGING_LEVEL": "WARNING"}
    left = processes.call(left_after_a_shutdown, (target, ssm), **env)
    assert left == {"target": False, "state": False, "speculator": False, "ssm": False}


def left_after_a_shutdown(models: tuple[str, str]) -> dict[str, bool]:
    """What of an engine is still there."""
    from vllm import LLM, SamplingParams

    from vllm_specinfer.evidence.engines import core_of, runner_of

    target, ssm = models
    llm = LLM(
        target,
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=engine.KV_BYTES,
        enforce_eager=True,
        speculative_config={"method": "specinfer", "model": ssm},
    )
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=8))
    runner = runner_of(llm)
    there = {
        "target": weakref.ref(runner.model),
        "state": weakref.ref(runner.model_state),
        "speculator": weakref.ref(runner.speculator),
        "ssm": weakref.ref(runner.speculator.sources.ssms[0].ssm.model),
    }
    core_of(llm).shutdown()
    gc.collect()
    return {name: known() is not None for name, known in there.items()}
