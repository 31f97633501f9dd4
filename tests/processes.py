"""Processes that tests call functions in, forked from one that has imported vLLM.

Importing it takes longer than most engines run.
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil

ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    # The blocks of all requests are checked after every step.
    "VLLM_SPECINFER_DEBUG": "1",
}
IMPORTED = [
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm_specinfer.cpu_worker",
    "vllm_specinfer.speculator",
]
# A new process now and then frees memory.
CALLS_PER_PROCESS = 12
_shared: list[ProcessPoolExecutor] = []


def call(function: Callable, argument: Any, timeout: float = 1200, **env: str) -> Any:
    """`function(argument)` in a process that later calls use again.

    Args:
        function: Of a module.
        argument: Its argument.
        timeout: Seconds for it.
        env: More of the environment, for a process that no other call uses. What is
            read when torch is imported must be in this process's environment.
    """
    if env:
        processes = _process(env)
    else:
        if not _shared:
            _shared.append(_process({}))
        processes = _shared[0]
    try:
        return processes.submit(function, argument).result(timeout)
    except BaseException:
        # What hangs or is half done must not reach the next call.
        _shared.clear()
        kill_children(psutil.Process())
        raise


def kill_children(process: psutil.Process) -> None:
    """Kill what a process has started, and what that has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def _process(env: dict[str, str]) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return ProcessPoolExecutor(
        1,
        context,
        _set_environment,
        ({**ENV, **env},),
        max_tasks_per_child=CALLS_PER_PROCESS,
    )


def _set_environment(env: dict[str, str]) -> None:
    os.environ.update(env)
