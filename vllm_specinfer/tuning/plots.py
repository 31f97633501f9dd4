"""The curves of a training run, as a picture."""

from collections.abc import Mapping
from pathlib import Path

from vllm_specinfer.plots import figure_for

CURVES_FILE = "curves.csv"
CURVES_PLOT = "curves.png"


def plot_curves(
    out: Path,
    losses: Mapping[str, list[tuple[int, float]]],
    bars: tuple[str, list[float]],
    points: tuple[str, list[float]],
    xlabel: str,
) -> None:
    """Draw losses by step and hit rates; says so where matplotlib is missing.

    Args:
        out: The folder for the picture.
        losses: Per curve its steps and losses.
        bars: Name and hit rates, from x = 1 on.
        points: Another name and its hit rates.
        xlabel: What x counts there.
    """
    figure = figure_for(out / CURVES_PLOT, 9, 3.5)
    if figure is None:
        return
    left, right = figure.subplots(1, 2)
    for name, rows in losses.items():
        if rows:
            left.plot(*zip(*rows, strict=True), label=name)
    left.set(xlabel="step", ylabel="training loss", title="Training loss")
    if any(losses.values()):
        left.legend()
    for (name, rates), draw in ((bars, right.bar), (points, right.scatter)):
        numbers = [str(n) for n in range(1, len(rates) + 1)]
        draw(numbers, rates, label=name, zorder=2)
    right.set(xlabel=xlabel, title="Validation tokens hit first", ylim=(0, 1))
    right.legend()
    figure.savefig(out / CURVES_PLOT)
