"""An engine that is shut down lets go of its models while somebody still has it, and
so does one that nobody has."""

import gc
import weakref
from pathlib import Path

import pytest

from tests import processes
from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama


@pytest.mark.parametrize(
    ("eager", "shut_down"), [(True, True), (False, True), (False, False)]
)
def test_models_are_gone_with_their_engine(tmp_path: Path, eager, shut_down) -> None:
    target = tiny_llama(tmp_path / "target", seed=0)
    ssm = noisy_copy(target, tmp_path / "ssm", noise=0.05)
    # In a process of its own: `hasten_starts` keeps vLLM from freezing what it holds.
    env = {"VLLM_LOGGING_LEVEL": "WARNING"}
    left = processes.call(left_of_an_engine, (target, ssm, eager, shut_down), **env)
    assert left and not any(left.values()), left


def left_of_an_engine(job: tuple[str, str, bool, bool]) -> dict[str, bool]:
    """What of an engine is still there.

    Args:
        job: The target, the SSM, whether nothing is compiled, and whether it is shut
            down, otherwise forgotten.
    """
    from vllm import LLM, SamplingParams

    from vllm_specinfer.evidence.engines import core_of, runner_of

    target, ssm, eager, shut_down = job
    llm = LLM(
        target,
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=engine.KV_BYTES,
        enforce_eager=eager,
        speculative_config={"method": "specinfer", "model": ssm},
    )
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=8))
    runner = runner_of(llm)
    models = {
        "target": runner.model,
        "ssm": runner.speculator.sources.ssms[0].ssm.model,
    }
    held = {
        "state": runner.model_state,
        "speculator": runner.speculator,
        **models,
        # It is a part of a model that is compiled.
        **{f"decoder of {name}": model.model for name, model in models.items()},
    }
    there = {name: weakref.ref(value) for name, value in held.items()}
    del runner, models, held
    if shut_down:
        core_of(llm).shutdown()
    else:
        del llm
    gc.collect()
    return {name: known() is not None for name, known in there.items()}
