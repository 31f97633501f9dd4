"""What the benchmarks do to engines that live in their process."""

from typing import Any


def runner_of(llm: Any) -> Any:
    """The model runner of an engine's only worker."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def forget(llm: Any) -> None:
    """Drop cached prefixes and finished texts: a prompt that is repeated is new."""
    llm.reset_prefix_cache()
    speculator = getattr(runner_of(llm), "speculator", None)
    sources = getattr(speculator, "sources", None)
    if sources is not None:
        sources.forget()
