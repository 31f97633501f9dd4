"""Engines that live in this process, so that one can look into them."""

import collections
import dataclasses
import gc
import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from vllm_specinfer.sentences import sentence

# So many positions of an engine are left for trees beyond the longest text.
ROOM_FOR_DRAFTS = 64


def stay_quiet() -> None:
    """Have vLLM log errors only."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def stay_in_process() -> None:
    """Have vLLM start the next engines in this process and log errors only."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # vLLM looks n-grams up in numba, which asks OpenMP for as many threads as there are
    # cores: so many torch would have from then on, in all engines.
    os.environ.setdefault("NUMBA_THREADING_LAYER", "workqueue")
    stay_quiet()


def cpu_kv_cache() -> dict[str, int]:
    """The argument of `vllm.LLM` for a KV cache of 1 GiB; on a CPU only, and only where
    `VLLM_CPU_KVCACHE_SPACE`, which vLLM has go before the argument, does not say it."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return {}
    return {"kv_cache_memory_bytes": 1 << 30}


def check_arguments(engine: dict[str, Any]) -> None:
    """Raises ValueError where `--engine` holds what no engine takes, or not from it."""
    from vllm import EngineArgs

    for name in ("model", "speculative_config"):
        if name in engine:
            raise ValueError(f"--engine must leave {name} to the command's options")

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(engine.keys() - known):
        raise ValueError(f"--engine must hold arguments of vllm.LLM; got {unknown[0]}")


def check_length(engine: dict[str, Any], longest: int) -> None:
    """Raises ValueError where `--engine` has no room for so many positions."""
    wanted = engine.get("max_model_len")
    if isinstance(wanted, int) and 0 < wanted < longest:
        raise ValueError(
            f"max_model_len must be at least {longest} for these prompts and answers; "
            f"got {wanted}"
        )


def check_cpu(command: str) -> None:
    """Raises ValueError where a command measures what only CPUs have."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ValueError(
            f"{command} must run on a CPU; got {current_platform.device_name}"
        )


def check_one_worker(engine: dict[str, Any]) -> None:
    """Raises ValueError where `--engine` asks for ranks, which one cannot look into."""
    if (ranks := engine.get("tensor_parallel_size", 1)) != 1:
        raise ValueError(
            "tensor_parallel_size must be 1 where one looks into the only worker; got "
            f"{ranks}"
        )


def start_engine(
    target: str,
    longest: int,
    max_num_seqs: int,
    config: dict[str, Any] | None,
    engine: dict[str, Any],
) -> Any:
    """An engine that counts its steps.

    Its KV cache has `VLLM_CPU_KVCACHE_SPACE` GiB, 1 by default, on CUDA, too.

    Args:
        target: Folder or hub id.
        longest: Positions of the longest text, with room for its trees.
        max_num_seqs: Requests at once.
        config: Speculative config; None for plain vLLM.
        engine: Further arguments of `vllm.LLM`, which go before these.

    Raises:
        ValueError: vLLM cannot use the input.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    check_arguments(engine)
    check_length(engine, longest)
    common = {
        "model": target,
        "max_model_len": longest,
        "max_num_seqs": max_num_seqs,
        "disable_log_stats": False,
        "speculative_config": config,
        **cpu_kv_cache(),
    }
    if current_platform.is_cuda():
        space = int(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
        # Where vLLM measures instead, it drops the graphs of the process's other
        # engines (`CUDAGraphWrapper.clear_all_graphs`), which then capture as they run.
        common |= {"kv_cache_memory_bytes": space << 30, "gpu_memory_utilization": 0.2}
    # vLLM collects a dozen times per engine, which must not read all modules again.
    gc.freeze()
    llm = LLM(**{**common, **engine})
    warn_of_waits(llm, max_num_seqs)
    return llm


def warn_of_waits(llm: Any, num_requests: int) -> None:
    """Say so where K/V has no room for so many requests of the greatest length."""
    config = llm.llm_engine.vllm_config
    room = config.cache_config.kv_cache_max_concurrency
    if room is not None and room < num_requests:
        print(
            f"vllm-specinfer: {num_requests} requests of up to "
            f"{config.model_config.max_model_len} tokens may wait for each other, K/V "
            f"has room for {room:.1f}: VLLM_CPU_KVCACHE_SPACE or --engine "
            "'{\"kv_cache_memory_bytes\": ...}' gives more",
            file=sys.stderr,
        )


def warn_of_memory(taken: int, left: int, num_engines: int) -> None:
    """Say so where the next engines will not fit beside the ones that have started.

    Args:
        taken: Bytes that the last one has taken.
        left: Bytes that are available.
        num_engines: How many are still to start.
    """
    if num_engines * taken > left:
        print(
            f"vllm-specinfer: {num_engines} more engines of {taken / 2**30:.1f} GiB, "
            f"which the last one took, need more than the {left / 2**30:.1f} GiB that "
            "are left, and this process may be killed; fewer configs need less",
            file=sys.stderr,
        )


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns in a process of its own, which then ends.

    It also ends where this one is killed.

    Raises:
        ChildProcessError: Something else has ended it.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=context, initializer=_end_with_parent
    ) as process:
        try:
            return process.submit(_run, function, *arguments).result()
        except BrokenProcessPool:
            raise ChildProcessError(
                "the engines' process must live until it is done; it was killed, as "
                "where memory is short"
            ) from None


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        if not hasattr(error, "errors"):
            raise
        # Pydantic's holds what no other process can get.
        raise ValueError(sentence(error)) from None


def _end_with_parent() -> None:
    def wait() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def core_of(llm: Any) -> Any:
    """The engine core."""
    return llm.llm_engine.engine_core.engine_core


def worker_of(llm: Any) -> Any:
    """An engine's only worker."""
    return core_of(llm).model_executor.driver_worker.worker


def runner_of(llm: Any) -> Any:
    """Its model runner."""
    return worker_of(llm).model_runner


def forget(llm: Any) -> None:
    """Drop cached prefixes and finished texts: a prompt that is repeated is new."""
    # The worker hears with the next step that a request has ended, and has its text.
    while core_of(llm).scheduler.has_finished_requests():
        llm.llm_engine.step()
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM must forget its cached prefixes; it did not")
    llm.collective_rpc(_forget_texts)


def _forget_texts(worker: Any) -> None:
    speculator = getattr(worker.model_runner, "speculator", None)
    sources = getattr(speculator, "sources", None)
    if sources is not None:
        sources.forget()


def tree_counts(llm: Any) -> list[int]:
    """vLLM's own counts of verified trees, their nodes and accepted nodes."""
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return [int(values[f"vllm:spec_decode_num_{name}"]) for name in names]


def num_steps(counts: "collections.Counter[int]") -> int:
    """Steps of all requests, by `StepLog.counts`.

    Raises:
        ValueError: None has made any.
    """
    if not (total := counts.total()):
        raise ValueError("answers must have two tokens at least; got one each")
    return total


class StepLog:
    """How many tokens each decoding step brought each request, with any method.

    Attributes:
        counts: Tokens of one request in one step -> how often. A text's last step may
            count tokens that are cut off after it.
        sources: Accepted nodes by source; empty with other methods.
    """

    def __init__(self, llm: Any) -> None:
        """Listen to an engine from now on."""
        self.counts: collections.Counter[int] = collections.Counter()
        self.sources: collections.Counter[str] = collections.Counter()
        self._decoding: set[str] = set()
        self._scheduler = core_of(llm).scheduler
        self._update = self._scheduler.update_from_output
        self._scheduler.update_from_output = self

    def __call__(self, scheduled: Any, output: Any) -> Any:
        """What the scheduler hears of a step."""
        pairs = zip(output.req_ids, output.sampled_token_ids, strict=False)
        for req_id, tokens in pairs:
            if not len(tokens) or req_id not in self._scheduler.requests:
                continue
            # A request's first token comes from its prompt.
            if req_id in self._decoding:
                self.counts[len(tokens)] += 1
            self._decoding.add(req_id)
        stats = getattr(output, "tree_stats", None)
        if stats is not None:
            self.sources.update(itertools.chain(*stats.accepted.values()))
        return self._update(scheduled, output)

    def restart(self) -> None:
        """Count from zero."""
        self.counts.clear()
        self.sources.clear()
        self._decoding.clear()
