"""Where pictures come from: matplotlib, which is optional."""

from pathlib import Path
from typing import Any


def pyplot_for(file: Path) -> Any | None:
    """matplotlib's pyplot, drawing into files; None where it is missing, and says so.

    Args:
        file: The picture that wants it.
    """
    try:
        import matplotlib
    except ImportError:
        print(f"{file.name} needs matplotlib: pip install matplotlib")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
