"""Where pictures come from: matplotlib, which is optional."""

from pathlib import Path
from typing import Any


def figure_for(file: Path, width: float, height: float) -> Any | None:
    """A figure of matplotlib's, in inches; None where it is missing, and says so.

    Args:
        file: The picture that wants it.
        width: Of the figure.
        height: Of the figure.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{file.name} needs matplotlib: pip install matplotlib")
        return None
    # Not pyplot's: those need a backend, and live until they are closed.
    return Figure((width, height), dpi=120, layout="tight")
