"""The same rows for a program (CSV) and for a reader (Markdown, a picture)."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_specinfer.plots import figure_for

# Of equal keys.
Rows = Sequence[dict[str, Any]]


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts that are ready to be shown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown_of(rows: Rows) -> str:
    """A table of rows of equal keys, numbers to three places."""
    shown = [
        [f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in rows
    ]
    return markdown(list(rows[0]), shown)


def write_csv(file: Path, rows: Rows) -> None:
    """Rows of equal keys, at least one; numbers in full."""
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def report(
    out: Path,
    name: str,
    rows: Rows,
    *,
    x: str,
    y: str,
    line: str,
) -> str:
    """Write rows as NAME.csv, NAME.md and NAME.png.

    Args:
        out: The folder.
        name: Of the files.
        rows: Of equal keys, at least one.
        x: The key of the picture's x axis.
        y: That of its y axis.
        line: The key whose values have a line each.

    Returns:
        The Markdown table.

    Raises:
        OSError: The folder cannot be written.
    """
    text = markdown_of(rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    write_csv(out / f"{name}.csv", rows)
    picture = out / f"{name}.png"
    figure = figure_for(picture, 7, 4.5)
    if figure is not None:
        axes = figure.subplots()
        for value in dict.fromkeys(row[line] for row in rows):
            points = [(row[x], row[y]) for row in rows if row[line] == value]
            axes.plot(*zip(*points, strict=True), "o-", label=f"{line} {value}")
        axes.set(xlabel=x, ylabel=y)
        axes.legend()
        figure.savefig(picture)
    return text
