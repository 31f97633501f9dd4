"""Methods against plain vLLM: the same prompts, in turn, on engines side by side.

All engines live in one process, and in each cell (prompts, temperature, batch) each of
them has as many requests in flight as the batch says: one that ends makes room for the
next prompt. They take turns, until as many requests have ended as the batch holds: what
slows the machine down slows all of them. Requests before the first one warm them up and
do not count, neither do the last ones, when there is nothing to fill the batch with,
nor a batch's first turn, if there are more: all its requests begin at once, and an
engine whose requests part then reads prompts of the next turn, too. Between cells
engines forget their texts.

Which engine starts first matters by several percent, so every further start is a
process of its own, with the engines in the opposite order.
"""

import collections
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cpuinfo
import numpy as np
import psutil
from tqdm import tqdm

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import (
    ROOM_FOR_DRAFTS,
    StepLog,
    core_of,
    forget,
    in_a_process,
    start_engine,
    warn_of_memory,
)
from vllm_specinfer.evidence.measured import PLAIN, Cell, Measured, Results, report
from vllm_specinfer.results import made_by, write_json


@dataclass(frozen=True)
class BenchSettings:
    """What is compared.

    Attributes:
        target: Folder or hub id.
        configs: Speculative config by the method's name.
        prompts: Sets of prompts, as `assets.prompt_ids` takes them.
        temperatures: Of the answers; each prompt has a seed of its own.
        batches: How many requests in flight.
        max_prompts: Of each set, spread over it; 0 for all.
        max_tokens: Of each answer.
        ignore_eos: All answers are that long.
        range_ratio: Their lengths are spread by so much of that in both directions, the
            same for every engine. Where all are equally long, the requests of plain
            vLLM stay in step, and it reads their prompts in one pass.
        engine: Further arguments of every `vllm.LLM`.
        starts: How often everything is measured, in alternating orders of starting.
        max_turns: Of each cell and start, those that count; 0 for as many as there are
            prompts for.
    """

    target: str
    configs: dict[str, dict[str, Any]]
    prompts: list[str]
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    batches: list[int] = field(default_factory=lambda: [1])
    max_prompts: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    range_ratio: float = 0.0
    engine: dict[str, Any] = field(default_factory=dict)
    starts: int = 1
    max_turns: int = 0

    def __post_init__(self) -> None:
        if PLAIN in self.configs:
            raise ValueError(f"no config may be named {PLAIN!r}; vLLM without one is")
        if sum(map(_is_ngram, self.configs.values())) > 1:
            raise ValueError(
                "vLLM 0.32 starts one engine with method 'ngram' per process; got "
                f"more: {', '.join(self.configs)}"
            )
        if not 0 <= self.range_ratio < 1:
            raise ValueError(
                f"range_ratio must be at least 0 and below 1; got {self.range_ratio}"
            )

    @property
    def cells(self) -> list[Cell]:
        """What every method is measured on."""
        cells = itertools.product(self.prompts, self.temperatures, self.batches)
        return [Cell(*cell) for cell in cells]

    @property
    def longest(self) -> int:
        """Most tokens of an answer."""
        return round(self.max_tokens * (1 + self.range_ratio))

    def lengths(self, count: int) -> list[int]:
        """Of so many answers, in no order; each of a token at least."""
        spread = (np.random.default_rng(0).permutation(count) + 0.5) / count
        factors = 1 + self.range_ratio * (2 * spread - 1)
        lengths = (self.max_tokens * factors).round().astype(int)
        return np.maximum(lengths, 1).tolist()


# [p][tokens] by name of the set.
Prompts = dict[str, list[list[int]]]


def bench(out: Path, settings: BenchSettings) -> str:
    """Measure all cells and write tables and pictures, anew after each cell.

    Args:
        out: The folder.
        settings: What to compare.

    Returns:
        The Markdown table.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or the disk is full.
    """
    prompts = load_prompts(settings)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", circumstances(settings))
    results: Results = {}
    for start in range(settings.starts):
        arguments = settings, prompts, start, results, out
        if settings.starts == 1:
            results = _measure_start(*arguments)
        else:
            results = in_a_process(_measure_start, *arguments)
    return report(out, results)


def load_prompts(settings: BenchSettings) -> Prompts:
    """All prompts, by the name of their set.

    Raises:
        ValueError: A set is no set of prompts, or is smaller than a batch.
        OSError: A file is missing.
    """
    prompts = {
        source: assets.prompt_ids(source, settings.max_prompts, settings.target)
        for source in settings.prompts
    }
    for source, found in prompts.items():
        if len(found) < max(settings.batches):
            raise ValueError(
                f"{source} must hold at least {max(settings.batches)} prompts, the "
                f"largest batch; got {len(found)}"
            )
    return prompts


def circumstances(settings: BenchSettings) -> dict[str, Any]:
    """What a comparison depends on, for the record."""
    return {
        "settings": asdict(settings),
        **made_by(),
        "cpu": cpuinfo.get_cpu_info().get("brand_raw"),
        "cores": os.cpu_count(),
    }


def _is_ngram(config: dict[str, Any] | None) -> bool:
    return config is not None and config["method"] == "ngram"


def joined(measured: Iterable[Results]) -> Results:
    """One measurement of several."""
    found: Results = {}
    for results in measured:
        for cell, methods in results.items():
            before = found.setdefault(cell, {})
            for name, one in methods.items():
                before[name] = before[name] + one if name in before else one
    return found


def _measure_start(
    settings: BenchSettings, prompts: Prompts, start: int, before: Results, out: Path
) -> Results:
    """Start all engines and measure all cells; every second time in reverse order.

    Returns:
        The results with those from before.
    """
    names = [PLAIN, *settings.configs]
    if start % 2:
        names.reverse()
    # vLLM 0.32 walks over all modules when an engine starts, and stumbles over those of
    # numba that an earlier engine with this method has loaded.
    names.sort(key=lambda name: _is_ngram(settings.configs.get(name)))
    of = f", {start + 1} of {settings.starts}"
    engines: dict[str, Any] = {}
    for name in tqdm(names, desc="starting engines" + of):
        available = psutil.virtual_memory().available
        engines[name] = start_method(settings, prompts, name)
        left = psutil.virtual_memory().available
        warn_of_memory(available - left, left, len(names) - len(engines))
    engines = {name: engines[name] for name in (PLAIN, *settings.configs)}
    results: Results = {}
    for cell, methods in measure(settings, engines, prompts, "turns" + of):
        results[cell] = methods
        report(out, joined([before, results]))
    return joined([before, results])


def start_method(settings: BenchSettings, prompts: Prompts, name: str) -> Any:
    """The engine of a method, in this process."""
    longest = max(map(len, itertools.chain(*prompts.values())))
    return start_engine(
        settings.target,
        longest + settings.longest + ROOM_FOR_DRAFTS,
        max(settings.batches),
        settings.configs.get(name),
        settings.engine,
    )


def measure(
    settings: BenchSettings, engines: dict[str, Any], prompts: Prompts, title: str
) -> Iterator[tuple[Cell, dict[str, Measured]]]:
    """Cell by cell what each engine did, with a progress bar over their turns."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    logs = {name: StepLog(llm) for name, llm in engines.items()}
    chosen_of = {
        cell: choose(prompts[cell.prompts], cell.batch, settings.max_turns)
        for cell in settings.cells
    }
    turns = {
        cell: num_turns(len(found), cell.batch) for cell, found in chosen_of.items()
    }
    num_turns_in_all = sum(turns.values()) + len(turns)
    with tqdm(total=num_turns_in_all * len(engines), desc=title) as bar:
        for cell in settings.cells:
            chosen, batch = chosen_of[cell], cell.batch
            params = [
                SamplingParams(
                    temperature=cell.temperature,
                    max_tokens=length,
                    ignore_eos=settings.ignore_eos,
                    seed=i,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for i, length in enumerate(settings.lengths(len(chosen)))
            ]
            traffic = {}
            for name, llm in engines.items():
                Traffic(llm, chosen[:batch], params, batch).finish()
                forget(llm)
                logs[name].restart()
                traffic[name] = Traffic(llm, chosen, params, batch)
                bar.update()
            order = collections.deque(engines)
            for _ in range(turns[cell]):
                for name in order:
                    traffic[name].take_turn()
                    bar.update()
                order.rotate(-1)
            for one in traffic.values():
                one.finish()
            yield cell, {name: traffic[name].measured(logs[name]) for name in engines}


def choose(prompts: list[list[int]], batch: int, max_turns: int) -> list[list[int]]:
    """As many prompts as so many turns need, spread over all; 0 turns for all of them.

    The first turn and the last requests, which do not count, need as many each.
    """
    wanted = batch * (max_turns + 2 * (batch > 1)) if max_turns else len(prompts)
    return assets.spread(prompts, wanted)


def num_turns(num_prompts: int, batch: int) -> int:
    """How often as many requests as a batch holds can end with the batch full.

    The first time does not count, unless it is the only one or a batch is one request.
    """
    return max(1, num_prompts // batch - (batch > 1))


class Traffic:
    """Requests for one engine, of which so many are in flight while there are any."""

    def __init__(
        self, llm: Any, prompts: list[list[int]], params: list[Any], batch: int
    ) -> None:
        """Nothing runs yet.

        Args:
            llm: The engine.
            prompts: [p][tokens].
            params: Sampling parameters of at least as many.
            batch: Requests in flight.
        """
        self._engine, self._core = llm.llm_engine, core_of(llm)
        self._waiting = collections.deque(enumerate(zip(prompts, params, strict=False)))
        self._batch = batch
        self._outputs: dict[int, Any] = {}
        self._tokens: list[int] = []
        self._seconds: list[float] = []

    def take_turn(self) -> None:
        """Run until as many more requests have ended as the batch holds."""
        before, start = self._num_tokens(), time.perf_counter()
        # However many have ended too soon.
        self._run_until((len(self._seconds) + 1) * self._batch)
        self._seconds.append(time.perf_counter() - start)
        self._tokens.append(self._num_tokens() - before)

    def finish(self) -> None:
        """Run until no request is left; that does not count."""
        self._run_until(len(self._outputs) + len(self._waiting) + self._num_running())

    def measured(self, log: StepLog) -> Measured:
        """The turns that count, and the texts of all requests."""
        outputs = [self._outputs[i] for i in sorted(self._outputs)]
        first = int(self._batch > 1 and len(self._tokens) > 1)
        return Measured(
            tokens=np.array(self._tokens[first:]),
            seconds=np.array(self._seconds[first:]),
            texts=[list(o.outputs[0].token_ids) for o in outputs],
            waits=[o.metrics.first_token_ts - o.metrics.queued_ts for o in outputs],
            steps=collections.Counter(log.counts),
            sources=collections.Counter(log.sources),
        )

    def _run_until(self, num_ended: int) -> None:
        while len(self._outputs) < num_ended:
            while self._waiting and self._num_running() < self._batch:
                number, (ids, params) = self._waiting.popleft()
                prompt = {"prompt_token_ids": ids}
                self._engine.add_request(str(number), prompt, params)
            for output in self._engine.step():
                self._outputs[int(output.request_id)] = output

    def _num_running(self) -> int:
        return self._engine.get_num_unfinished_requests()

    def _num_tokens(self) -> int:
        """Of all texts so far, the unfinished ones too."""
        running = self._core.scheduler.requests.values()
        ended = (len(o.outputs[0].token_ids) for o in self._outputs.values())
        return sum(ended) + sum(request.num_output_tokens for request in running)
