"""Methods against plain vLLM: the same prompts, in turn, on engines side by side.

All engines live in one process, and in each cell (prompts, temperature, batch) each of
them has as many requests in flight as the batch says: one that ends makes room for the
next prompt. They take turns, until as many requests have ended as the batch holds: what
slows the machine down slows all of them. Requests before the first one warm them up and
do not count, neither do the last ones, when there is nothing to fill the batch with;
between cells engines forget their texts.

Which engine starts first matters by several percent, so every further start is a
process of its own, with the engines in the opposite order.
"""

import collections
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cpuinfo
import numpy as np
from tqdm import tqdm

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import ROOM_FOR_DRAFTS, StepLog, core_of, forget
from vllm_specinfer.evidence.tables import markdown, write_csv
from vllm_specinfer.plots import pyplot_for
from vllm_specinfer.tuning.settings import installed_versions, write_json

PLAIN = "plain"
QUARTILES = (25, 50, 75)
Cell = tuple[str, float, int]


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
        engine: Further arguments of every `vllm.LLM`.
        starts: How often everything is measured, in alternating orders of starting.
    """

    target: str
    configs: dict[str, dict[str, Any]]
    prompts: list[str]
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    batches: list[int] = field(default_factory=lambda: [1])
    max_prompts: int = 0
    max_tokens: int = 128
    ignore_eos: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    starts: int = 1

    def __post_init__(self) -> None:
        if PLAIN in self.configs:
            raise ValueError(f"no config may be named {PLAIN!r}; vLLM without one is")
        if sum(map(_is_ngram, self.configs.values())) > 1:
            raise ValueError(
                "vLLM 0.32 starts one engine with method 'ngram' per process; got "
                f"more: {', '.join(self.configs)}"
            )
        if min(self.batches) < 1:
            raise ValueError(f"batches must be at least 1; got {self.batches}")
        if self.starts < 1:
            raise ValueError(f"starts must be at least 1; got {self.starts}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2; got {self.max_tokens}")

    @property
    def cells(self) -> list[Cell]:
        """What every method is measured on."""
        return list(itertools.product(self.prompts, self.temperatures, self.batches))


@dataclass(frozen=True)
class Measured:
    """One method in one cell.

    Attributes:
        tokens: [t] tokens of each measured turn.
        seconds: [t] that they took.
        texts: Token ids of all answers.
        waits: Seconds to the first token of each.
        steps: Tokens that a decoding step brought a request -> how often.
        sources: Accepted nodes by specinfer's sources.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    texts: list[list[int]]
    waits: list[float]
    steps: collections.Counter[int]
    sources: collections.Counter[str] = field(default_factory=collections.Counter)

    def __add__(self, other: "Measured") -> "Measured":
        """Both as one."""
        return Measured(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.seconds, other.seconds]),
            self.texts + other.texts,
            self.waits + other.waits,
            self.steps + other.steps,
            self.sources + other.sources,
        )

    @property
    def rates(self) -> np.ndarray:
        """[t] tokens per second."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Per request; prompts and their first tokens do not count."""
        return sum(n * c for n, c in self.steps.items()) / sum(self.steps.values())

    @property
    def accepted(self) -> list[float]:
        """Per depth from 1 on: part of the steps that accepted so many drafts."""
        total = sum(self.steps.values())
        return [
            sum(count for n, count in self.steps.items() if n > depth) / total
            for depth in range(1, max(self.steps))
        ]

    @property
    def by_source(self) -> dict[str, float]:
        """Accepted nodes of each source per step of a request."""
        total = sum(self.steps.values())
        return {name: n / total for name, n in sorted(self.sources.items())}


# [p][tokens] by name of the set; what was measured by cell and method.
Prompts = dict[str, list[list[int]]]
Results = dict[Cell, dict[str, Measured]]


def bench(out: Path, settings: BenchSettings, command: Sequence[str]) -> str:
    """Measure all cells and write tables and pictures.

    Args:
        out: The folder.
        settings: What to compare.
        command: The command line, for the record.

    Returns:
        The Markdown table.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or the disk is full.
    """
    prompts = load_prompts(settings)
    results = _joined(_measured_starts(settings, prompts))
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "bench.json", circumstances(settings, command))
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


def circumstances(settings: BenchSettings, command: Sequence[str]) -> dict[str, Any]:
    """What a comparison depends on, for the record."""
    return {
        "settings": asdict(settings),
        "command": list(command),
        "versions": installed_versions(),
        "cpu": cpuinfo.get_cpu_info().get("brand_raw"),
        "cores": os.cpu_count(),
    }


def _is_ngram(config: dict[str, Any] | None) -> bool:
    return config is not None and config["method"] == "ngram"


def _measured_starts(settings: BenchSettings, prompts: Prompts) -> Iterator[Results]:
    """The results of each start."""
    if settings.starts == 1:
        yield _measure_start(settings, prompts, 0)
        return
    context = multiprocessing.get_context("spawn")
    for start in range(settings.starts):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            yield process.submit(_measure_start, settings, prompts, start).result()


def _joined(starts: Iterator[Results]) -> Results:
    """One measurement of several."""
    joined: Results = {}
    for results in starts:
        for cell, methods in results.items():
            before = joined.setdefault(cell, {})
            for name, one in methods.items():
                before[name] = before[name] + one if name in before else one
    return joined


def _measure_start(settings: BenchSettings, prompts: Prompts, start: int) -> Results:
    """Start all engines and measure all cells; every second time in reverse order."""
    from vllm import LLM

    longest = max(map(len, itertools.chain(*prompts.values())))
    configs = [(PLAIN, None), *settings.configs.items()]
    if start % 2:
        configs.reverse()
    # vLLM 0.32 walks over all modules when an engine starts, and stumbles over those of
    # numba that an earlier engine with this method has loaded.
    configs.sort(key=lambda named: _is_ngram(named[1]))
    engines = {}
    of = f", {start + 1} of {settings.starts}"
    for name, config in tqdm(configs, desc="starting engines" + of):
        engines[name] = LLM(
            **{
                "model": settings.target,
                "max_model_len": longest + settings.max_tokens + ROOM_FOR_DRAFTS,
                "max_num_seqs": max(settings.batches),
                "disable_log_stats": False,
                "speculative_config": config,
                **settings.engine,
            }
        )
    engines = {name: engines[name] for name in (PLAIN, *settings.configs)}
    return _measure(settings, engines, prompts, "turns" + of)


def _measure(
    settings: BenchSettings, engines: dict[str, Any], prompts: Prompts, title: str
) -> Results:
    """All cells, with a progress bar over the engines' turns."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    logs = {name: StepLog(llm) for name, llm in engines.items()}
    turns = {cell: num_turns(len(prompts[cell[0]]), cell[2]) for cell in settings.cells}
    num_turns_in_all = sum(turns.values()) + len(turns)
    results: Results = {}
    with tqdm(total=num_turns_in_all * len(engines), desc=title) as bar:
        for cell in settings.cells:
            chosen, temperature, batch = prompts[cell[0]], *cell[1:]
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=settings.max_tokens,
                    ignore_eos=settings.ignore_eos,
                    seed=i,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                for i in range(len(chosen))
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
            results[cell] = {
                name: traffic[name].measured(logs[name]) for name in engines
            }
    return results


def num_turns(num_prompts: int, batch: int) -> int:
    """How often as many requests as a batch holds can end with the batch full."""
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
        self._run_until(len(self._outputs) + self._batch)
        self._seconds.append(time.perf_counter() - start)
        self._tokens.append(self._num_tokens() - before)

    def finish(self) -> None:
        """Run until no request is left; that does not count."""
        self._run_until(len(self._outputs) + len(self._waiting) + self._num_running())

    def measured(self, log: StepLog) -> Measured:
        """All turns, and the texts of all requests."""
        outputs = [self._outputs[i] for i in sorted(self._outputs)]
        return Measured(
            tokens=np.array(self._tokens),
            seconds=np.array(self._seconds),
            texts=[list(o.outputs[0].token_ids) for o in outputs],
            waits=[o.metrics.first_token_latency for o in outputs],
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


def report(out: Path, results: Results) -> str:
    """Write tables (every turn, method, depth and source) and pictures.

    Returns:
        The Markdown table.
    """
    turns, depths, sources, rows, shown = [], [], [], [], []
    for cell, methods in results.items():
        where = dict(zip(("prompts", "temperature", "batch"), cell, strict=True))
        plain = methods[PLAIN]
        for name, one in methods.items():
            row = {**where, "method": name}
            for tokens, seconds in zip(one.tokens, one.seconds, strict=True):
                turns.append({**row, "tokens": tokens, "seconds": seconds})
            for depth, part in enumerate(one.accepted, start=1):
                depths.append({**row, "depth": depth, "accepted": part})
            for source, part in one.by_source.items():
                sources.append({**row, "source": source, "accepted per step": part})
            rates = np.percentile(one.rates, QUARTILES)
            ratios = np.percentile(one.rates / plain.rates, QUARTILES)
            pairs = zip(one.texts, plain.texts, strict=True)
            identical = sum(a == b for a, b in pairs)
            row |= _by_quartile("tokens/s", rates) | _by_quartile("ratio", ratios)
            row |= {
                "steps": sum(one.steps.values()),
                "tokens per step": one.tokens_per_step,
                "seconds to first token": float(np.median(one.waits)),
                "identical": identical,
                "texts": len(one.texts),
            }
            rows.append(row)
            # The V1 runner, plain vLLM's default on a CPU, draws other random numbers.
            same = "-" if cell[1] else f"{identical} of {len(one.texts)}"
            spread = "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratios)
            speed = "{1:.1f} ({0:.1f} to {2:.1f})".format(*rates)
            texts = [Path(cell[0]).name, *map(str, cell[1:]), name, speed, spread]
            shown.append([*texts, f"{one.tokens_per_step:.2f}", same])
    columns = ["prompts", "temperature", "batch", "method", "tokens/s", "ratio"]
    text = markdown([*columns, "tokens per step", "identical"], shown)
    (out / "table.md").write_text(text)
    write_csv(out / "table.csv", rows)
    write_csv(out / "turns.csv", turns)
    if depths:
        write_csv(out / "depths.csv", depths)
    if sources:
        write_csv(out / "sources.csv", sources)
        _plot(out / "sources.png", results, _draw_sources)
    _plot(out / "speedup.png", results, _draw_ratios)
    _plot(out / "depths.png", results, _draw_depths)
    return text


def _by_quartile(name: str, values: np.ndarray) -> dict[str, float]:
    names = (f"{name} 25%", f"{name} median", f"{name} 75%")
    return dict(zip(names, values.tolist(), strict=True))


def _plot(file: Path, results: Results, draw: Any) -> None:
    """One panel per set of prompts and temperature."""
    pyplot = pyplot_for(file)
    if pyplot is None:
        return
    panels = collections.defaultdict(dict)
    for (source, temperature, batch), methods in results.items():
        panels[source, temperature][batch] = methods
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6 * len(panels), 4), squeeze=False, sharey=True
    )
    for panel, (key, by_batch) in zip(axes[0], panels.items(), strict=True):
        draw(panel, by_batch)
        panel.set_title(f"{Path(key[0]).name}, T = {key[1]:g}")
        panel.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def _draw_ratios(axes: Any, by_batch: dict[int, dict[str, Measured]]) -> None:
    """Tokens per second over plain by batch: medians, quartiles as bars."""
    first = next(iter(by_batch.values()))
    names = [name for name in first if name != PLAIN]
    for i, name in enumerate(names):
        ratios = [m[name].rates / m[PLAIN].rates for m in by_batch.values()]
        low, middle, high = np.transpose([np.percentile(r, QUARTILES) for r in ratios])
        # Beside each other, so that bars do not hide each other.
        x = np.arange(len(by_batch)) + 0.06 * (i - (len(names) - 1) / 2)
        bars = np.stack([middle - low, high - middle])
        axes.errorbar(x, middle, bars, fmt="o-", capsize=3, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8, label=PLAIN)
    axes.set_xticks(range(len(by_batch)), by_batch)
    axes.set(xlabel="batch", ylabel="tokens/s over plain vLLM")


def _draw_depths(axes: Any, by_batch: dict[int, dict[str, Measured]]) -> None:
    """Tokens per step if drafts went no deeper than that, at the smallest batch."""
    batch = min(by_batch)
    for name, one in by_batch[batch].items():
        if name == PLAIN:
            continue
        tokens = 1 + np.cumsum([0, *one.accepted])
        axes.plot(range(len(tokens)), tokens, "o-", label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="depth", ylabel=f"tokens per step, batch {batch}")


def _draw_sources(axes: Any, by_batch: dict[int, dict[str, Measured]]) -> None:
    """Accepted nodes per step, a bar for each method and batch, a part per source."""
    bars = {
        f"{name}, {batch}": one.by_source
        for batch, methods in by_batch.items()
        for name, one in methods.items()
        if one.sources
    }
    height = np.zeros(len(bars))
    for source in sorted(set(itertools.chain(*bars.values()))):
        parts = np.array([parts.get(source, 0.0) for parts in bars.values()])
        axes.bar(list(bars), parts, bottom=height, label=source)
        height += parts
    axes.tick_params("x", rotation=30)
    axes.set(xlabel="method, batch", ylabel="accepted nodes per step")
