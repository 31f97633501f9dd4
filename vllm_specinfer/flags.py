"""Switches in the environment."""

import os


def is_on(name: str) -> bool:
    """Whether a variable is set to anything but 0."""
    return os.environ.get(name, "0") not in ("", "0")
