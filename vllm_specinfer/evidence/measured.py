"""What was measured of several methods, as tables and pictures."""

import collections
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_specinfer.evidence.engines import num_steps
from vllm_specinfer.evidence.tables import markdown, write_csv
from vllm_specinfer.plots import figure_for

PLAIN = "plain"
QUARTILES = (25, 50, 75)


class Cell(NamedTuple):
    """What every method is measured on: a set of prompts, so many in flight."""

    prompts: str
    temperature: float
    batch: int


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
    def num_steps(self) -> int:
        """As `engines.num_steps`."""
        return num_steps(self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Per request; prompts and their first tokens do not count."""
        return sum(n * c for n, c in self.steps.items()) / self.num_steps

    @property
    def accepted(self) -> list[float]:
        """Per depth from 1 on: part of the steps that accepted so many drafts."""
        total = self.num_steps
        return [
            sum(count for n, count in self.steps.items() if n > depth) / total
            for depth in range(1, max(self.steps))
        ]

    @property
    def by_source(self) -> dict[str, float]:
        """Accepted nodes of each source per step of a request."""
        total = self.num_steps
        return {name: n / total for name, n in sorted(self.sources.items())}


# By cell and method.
Results = dict[Cell, dict[str, Measured]]


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
            same = "-" if cell.temperature else f"{identical} of {len(one.texts)}"
            spread = "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratios)
            speed = "{1:.1f} ({0:.1f} to {2:.1f})".format(*rates)
            texts = [Path(cell.prompts).stem, *map(str, cell[1:]), name, speed, spread]
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
    """One panel per set of prompts and temperature, two in a row."""
    panels = collections.defaultdict(dict)
    for (source, temperature, batch), methods in results.items():
        panels[source, temperature][batch] = methods
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = figure_for(file, 6 * columns, 4 * rows)
    if figure is None:
        return
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for empty in axes.flat[len(panels) :]:
        empty.remove()
    for panel, (key, by_batch) in zip(axes.flat, panels.items(), strict=False):
        draw(panel, dict(sorted(by_batch.items())))
        panel.set_title(f"{Path(key[0]).stem}, T = {key[1]:g}")
        panel.legend(fontsize="small")
    figure.savefig(file)


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
