"""Processes that engines are compared in."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pydantic
import pytest

from tests import processes
from tests.e2e.engine import tiny
from tests.e2e.models import tiny_llama
from vllm_specinfer.evidence import engines

SCRIPT = """
import os, sys, time
from pathlib import Path
from vllm_specinfer.evidence.engines import in_a_process

def stay(file):
    Path(file).with_suffix(".new").write_text(str(os.getpid()))
    Path(file).with_suffix(".new").rename(file)
    time.sleep(600)

if __name__ == "__main__":
    in_a_process(stay, sys.argv[1])
"""


def test_a_process_ends_where_the_one_that_started_it_is_killed(tmp_path):
    script, file = tmp_path / "script.py", tmp_path / "pid"
    script.write_text(SCRIPT)
    command = [sys.executable, script, file]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as parent:
        within(60, file.exists)
        child = psutil.Process(int(file.read_text()))
        assert not is_gone(child)
        parent.kill()
    within(30, lambda: is_gone(child))


def threads_beside_numba(cores: int) -> int:
    """How many torch has of two, after a loop in numba."""
    engines.stay_in_process()
    import numba
    import torch

    @numba.njit(parallel=True)
    def total() -> int:
        count = 0
        for i in numba.prange(8):
            count += i
        return count

    torch.set_num_threads(2)
    assert cores == numba.config.NUMBA_NUM_THREADS and total() == 28
    return torch.get_num_threads()


def test_a_process_that_is_killed_is_an_error_that_says_so():
    with pytest.raises(ChildProcessError, match="it was killed, as where memory"):
        engines.in_a_process(os._exit, 9)


def refused_by_pydantic() -> None:
    pydantic.TypeAdapter(int).validate_python("no number")


def test_a_refusal_in_a_process_is_its_sentence():
    with pytest.raises(ValueError, match="^Input should be a valid integer"):
        engines.in_a_process(refused_by_pydantic)


def counts_of_a_repeated_prompt(model: str) -> list[list[int]]:
    """What is verified and accepted each time, where all is forgotten in between."""
    from vllm import LLM, SamplingParams

    engines.stay_in_process()
    config = {"method": "specinfer", "model": "suffix", "scheduler": "static"}
    made = {**tiny(model), "enforce_eager": True, "disable_log_stats": False}
    llm = LLM(**made, speculative_config=config)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    found = [engines.tree_counts(llm)]
    for _ in range(3):
        llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5]}], params, use_tqdm=False)
        engines.forget(llm)
        found.append(engines.tree_counts(llm))
    return np.diff(found, axis=0).tolist()


def test_a_text_that_has_just_ended_is_forgotten_too(tmp_path):
    model = tiny_llama(tmp_path / "model", seed=0)
    first, *others = processes.call(counts_of_a_repeated_prompt, model)
    assert others == [first] * 2


def test_requests_that_will_wait_for_k_v_are_spoken_of(capsys):
    cache = SimpleNamespace(kv_cache_max_concurrency=7.5)
    model = SimpleNamespace(max_model_len=1024)
    config = SimpleNamespace(cache_config=cache, model_config=model)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=config))
    engines.warn_of_waits(llm, 7)
    assert not capsys.readouterr().err
    engines.warn_of_waits(llm, 8)
    said = capsys.readouterr().err
    assert "8 requests of up to 1024 tokens" in said and "has room for 7.5" in said


def test_engines_that_will_not_fit_into_memory_are_spoken_of(capsys):
    gib = 1 << 30
    engines.warn_of_memory(3 * gib, 6 * gib, 2)
    engines.warn_of_memory(3 * gib, 0, 0)
    assert not capsys.readouterr().err
    engines.warn_of_memory(3 * gib, 5 * gib, 2)
    said = capsys.readouterr().err
    assert "2 more engines of 3.0 GiB" in said and "5.0 GiB that are left" in said


def test_an_engine_that_looks_ngrams_up_leaves_the_others_their_threads():
    assert processes.call(threads_beside_numba, 3, NUMBA_NUM_THREADS="3") == 2


def is_gone(process: psutil.Process) -> bool:
    """Or a zombie, which nobody waits for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def within(seconds: float, happens) -> None:
    """Raises AssertionError where it does not happen."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.1)
