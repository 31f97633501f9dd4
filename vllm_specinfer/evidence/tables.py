"""The same rows for a program (CSV) and for a reader (Markdown)."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts that are ready to be shown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_csv(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Rows of equal keys, at least one; numbers in full."""
    with file.open("w", newline="") as target:
        writer = csv.DictWriter(target, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
