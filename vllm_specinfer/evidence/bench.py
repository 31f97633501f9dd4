"""Methods against plain vLLM: the same prompts, in turn, on engines side by side.

All engines live in this process. In each cell (prompts, temperature, batch) they answer
a batch of prompts one after the other, in an order that rotates, before the next batch
is begun: what slows the machine down slows all of them. A batch before the first one
warms them up and does not count; between cells they forget their texts. A batch size
leaves out the prompts that do not fill a last batch.
"""

import collections
import functools
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import cpuinfo
import numpy as np
from tqdm import tqdm

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import ROOM_FOR_DRAFTS, StepLog, forget
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
        batches: How many prompts at once.
        max_prompts: Of each set, spread over it; 0 for all.
        max_tokens: Of each answer.
        ignore_eos: All answers are that long.
        engine: Further arguments of every `vllm.LLM`.
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
        tokens: [b] tokens of each measured batch.
        seconds: [b] that they took.
        texts: Token ids of all answers.
        waits: Seconds to the first token of each.
        steps: Tokens that a decoding step brought a request -> how often.
    """

    tokens: np.ndarray
    seconds: np.ndarray
    texts: list[list[int]]
    waits: list[float]
    steps: Mapping[int, int]

    @property
    def rates(self) -> np.ndarray:
        """[b] tokens per second."""
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
    engines = _start(settings, max(map(len, itertools.chain(*prompts.values()))))
    results = measure(settings, engines, prompts)
    out.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": asdict(settings),
        "command": list(command),
        "versions": installed_versions(),
        "cpu": cpuinfo.get_cpu_info().get("brand_raw"),
        "cores": os.cpu_count(),
    }
    write_json(out / "bench.json", content)
    return report(out, results)


def _is_ngram(config: dict[str, Any] | None) -> bool:
    return config is not None and config["method"] == "ngram"


def _start(settings: BenchSettings, longest: int) -> dict[str, tuple[Any, StepLog]]:
    """Every method's engine, plain vLLM first, vLLM's ngram last."""
    from vllm import LLM

    engines = {}
    configs = [(PLAIN, None), *settings.configs.items()]
    # vLLM 0.32 walks over all modules when an engine starts, and stumbles over those of
    # numba that an earlier engine with this method has loaded.
    configs.sort(key=lambda named: _is_ngram(named[1]))
    for name, config in tqdm(configs, desc="starting engines"):
        llm = LLM(
            **{
                "model": settings.target,
                "max_model_len": longest + settings.max_tokens + ROOM_FOR_DRAFTS,
                "max_num_seqs": max(settings.batches),
                "disable_log_stats": False,
                "speculative_config": config,
                **settings.engine,
            }
        )
        engines[name] = llm, StepLog(llm)
    return engines


def measure(
    settings: BenchSettings,
    engines: dict[str, tuple[Any, StepLog]],
    prompts: dict[str, list[list[int]]],
) -> Results:
    """All cells, with a progress bar over the answers of a batch by an engine.

    Args:
        settings: What to compare.
        engines: By name, in this process.
        prompts: [prompts][tokens] by set.
    """
    from vllm import SamplingParams

    num_batches = sum(1 + len(prompts[s]) // batch for s, _, batch in settings.cells)
    results: Results = {}
    with tqdm(total=num_batches * len(engines), desc="batches") as bar:
        for cell in settings.cells:
            chosen, temperature, batch = prompts[cell[0]], *cell[1:]
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=settings.max_tokens,
                    ignore_eos=settings.ignore_eos,
                    seed=i,
                )
                for i in range(len(chosen))
            ]
            answer = functools.partial(_answer, batch, chosen, params)
            for llm, log in engines.values():
                answer(llm, 0)
                forget(llm)
                log.restart()
                bar.update()
            answers = collections.defaultdict(list)
            for number in range(len(chosen) // batch):
                order = collections.deque(engines)
                order.rotate(-number)
                for name in order:
                    answers[name].append(answer(engines[name][0], number))
                    bar.update()
            results[cell] = {
                name: _measured(answers[name], log)
                for name, (_, log) in engines.items()
            }
    return results


def _answer(
    batch: int, prompts: list[list[int]], params: list[Any], llm: Any, number: int
) -> tuple[list[Any], float]:
    """The outputs for one batch of prompts, and the seconds that they took."""
    chosen = slice(number * batch, (number + 1) * batch)
    inputs = [{"prompt_token_ids": ids} for ids in prompts[chosen]]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params[chosen], use_tqdm=False)
    return outputs, time.perf_counter() - start


def _measured(answers: list[tuple[list[Any], float]], log: StepLog) -> Measured:
    batches = [[list(o.outputs[0].token_ids) for o in outs] for outs, _ in answers]
    return Measured(
        tokens=np.array([sum(map(len, texts)) for texts in batches]),
        seconds=np.array([seconds for _, seconds in answers]),
        texts=sum(batches, []),
        waits=[o.metrics.first_token_latency for outs, _ in answers for o in outs],
        steps=dict(log.counts),
    )


def report(out: Path, results: Results) -> str:
    """Write tables (every batch, every method, every depth) and pictures.

    Returns:
        The Markdown table.
    """
    batches, depths, rows, shown = [], [], [], []
    for cell, methods in results.items():
        where = dict(zip(("prompts", "temperature", "batch"), cell, strict=True))
        plain = methods[PLAIN]
        for name, one in methods.items():
            row = {**where, "method": name}
            for tokens, seconds in zip(one.tokens, one.seconds, strict=True):
                batches.append({**row, "tokens": tokens, "seconds": seconds})
            for depth, part in enumerate(one.accepted, start=1):
                depths.append({**row, "depth": depth, "accepted": part})
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
    write_csv(out / "batches.csv", batches)
    if depths:
        write_csv(out / "depths.csv", depths)
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
