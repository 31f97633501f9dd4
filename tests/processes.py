"""Processes that tests call functions in, forked from one that has imported vLLM.

Importing it takes longer than most engines run.
"""

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

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


def start(
    main: Callable[[], int | None],
    arguments: Iterable[object],
    output: Path,
    **env: str,
) -> ForkServerProcess:
    """Start a program in a session of its own; its engine cores and ranks fork, too.

    Args:
        main: Of a module; it reads `sys.argv` and may return its exit code.
        arguments: Of its command line.
        output: A file for what it writes, also to stderr.
        env: More of the environment. What is read when torch or vLLM are imported
            must be in this process's environment.
    """
    program = (main, [*map(str, arguments)], output, os.environ | env)
    process = _context().Process(target=_run, args=program)
    process.start()
    return process


def run(
    main: Callable[[], int | None],
    arguments: Iterable[object],
    output: Path,
    timeout: float = 600,
    **env: str,
) -> str:
    """What a program writes that must succeed; see `start`."""
    process = start(main, arguments, output, **env)
    try:
        process.join(timeout)
        assert process.exitcode == 0, output.read_text()[-5000:]
    finally:
        kill(process)
    return output.read_text()


def kill(program: ForkServerProcess) -> None:
    """Kill what `start` has started, and what that has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.join()


def kill_children(process: psutil.Process) -> None:
    """Kill what a process has started, and what that has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = process.children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        # A fork server that is about to die would still be asked.
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                while child.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.01)


def _process(env: dict[str, str]) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1,
        _context(),
        set_environment,
        ({**ENV, **env},),
        max_tasks_per_child=CALLS_PER_PROCESS,
    )


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _run(
    main: Callable[[], int | None],
    arguments: list[str],
    output: Path,
    environment: dict[str, str],
) -> None:
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [main.__module__, *arguments]
    hasten_starts()
    with forked_processes():
        sys.exit(main())


@contextlib.contextmanager
def forked_processes() -> Iterator[None]:
    """What would be spawned, engine cores and ranks, forks: none imports vLLM again.

    Those that wait for each other leave the cores to those that work.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    context = multiprocessing.get_context("fork")
    sleep = functools.partial(time.sleep, 1e-3)
    with (
        mock.patch.object(multiprocessing, "get_context", lambda method=None: context),
        mock.patch.object(shm_broadcast, "sched_yield", sleep),
    ):
        yield


@functools.cache
def hasten_starts() -> None:
    """Of all engines of this process, and of those that it forks."""
    import vllm.entrypoints.llm  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

    # vLLM looks at each architecture in a process of its own.
    registry._run_in_subprocess = lambda inspect: inspect()
    # With every engine it looks through all modules for kernels; once is enough.
    override = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(override)
    # It collects a dozen times per engine, and thaws what is frozen when one ends: it
    # must not read all modules again.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def set_environment(env: dict[str, str]) -> None:
    """Update this process's."""
    os.environ.update(env)
