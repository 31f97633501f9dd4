"""Where weights are far: on several ranks, or in the host's memory.

Plain vLLM and specinfer answer the same prompts under the same conditions, each engine
in a process of its own: plain, specinfer, plain, specinfer. They do not take turns, as
`bench` has them: idle ranks of vLLM spin for a second after their last step, on the
cores that the other engine's ranks are bound to.

Offloading was never run on a GPU: nothing of it is measured.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specinfer import refusals
from vllm_specinfer.evidence.bench import (
    BenchSettings,
    Prompts,
    circumstances,
    joined,
    load_prompts,
    measure,
    start_method,
)
from vllm_specinfer.evidence.engines import core_of, in_a_process
from vllm_specinfer.evidence.measured import PLAIN, QUARTILES, Results
from vllm_specinfer.evidence.tables import Rows
from vllm_specinfer.options import METHOD
from vllm_specinfer.parsing import parse_options
from vllm_specinfer.results import write_json

RANKS = 2


def tensor_parallel() -> dict[str, Any]:
    """Arguments of an engine of two ranks; on a CPU each has half of the cores.

    Raises:
        ValueError: There are fewer cores than ranks.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < RANKS:
        raise ValueError(f"tp must have at least {RANKS} cores; got {len(cores)}")
    # vLLM's own choice is a NUMA node for each rank.
    parts = (",".join(map(str, part)) for part in np.array_split(cores, RANKS))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(parts))
    return {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}


def offloaded(gib: float) -> dict[str, Any]:
    """Arguments of an engine that keeps so much of the target in the host's memory.

    Raises:
        ValueError: There is no other memory.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        raise ValueError(
            "offload must run on a CUDA device, whose weights go to the host; got "
            f"{current_platform.device_name}"
        )
    return {"cpu_offload_gb": gib}


def compare(out: Path, settings: BenchSettings) -> Iterator[Rows]:
    """A row per temperature and batch; settings and versions go to `bench.json`.

    Args:
        out: The folder.
        settings: What is compared; one config, `METHOD`.

    Yields:
        The rows of the starts so far.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or the disk is full.
    """
    refusals.refuse(refusals.device_reason())
    for config in settings.configs.values():
        parse_options(config)  # what is wrong is said before engines start
    prompts = load_prompts(settings)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", circumstances(settings))
    results: Results = {}
    for i in range(settings.starts):
        of = f"{i + 1} of {settings.starts}"
        started = (
            in_a_process(_alone, settings, prompts, name, f"{name}, {of}")
            for name in (PLAIN, METHOD)
        )
        results = joined([results, *started])
        yield rows_of(results)


def _alone(settings: BenchSettings, prompts: Prompts, name: str, title: str) -> Results:
    """What one engine does, which then ends its ranks."""
    llm = start_method(settings, prompts, name)
    results = dict(measure(settings, {name: llm}, prompts, title))
    core_of(llm).shutdown()
    return results


def rows_of(results: Results) -> Rows:
    """Medians over turns; ratios are those of the same prompts."""
    rows = []
    for (_, temperature, batch), methods in results.items():
        plain, trees = methods[PLAIN], methods[METHOD]
        low, middle, high = np.percentile(trees.rates / plain.rates, QUARTILES).tolist()
        same = sum(a == b for a, b in zip(plain.texts, trees.texts, strict=True))
        # The V1 runner, plain vLLM's default on a CPU, draws other random numbers.
        identical = "-" if temperature else same
        rows.append(
            {
                "temperature": temperature,
                "batch": batch,
                "plain tokens/s": float(np.median(plain.rates)),
                "specinfer tokens/s": float(np.median(trees.rates)),
                "ratio": middle,
                "25%": low,
                "75%": high,
                "tokens per step": trees.tokens_per_step,
                "identical": identical,
                "texts": len(plain.texts),
            }
        )
    return rows
