"""Where things are kept that every engine of a machine can use again."""

import os
import platform
from pathlib import Path


def cache_folder() -> Path:
    """Our part of vLLM's cache; it may not exist yet."""
    root = os.environ.get("VLLM_CACHE_ROOT") or Path(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm"
    )
    # Not `Path.expanduser`, which fails where there is no home.
    return Path(os.path.expanduser(root), "specinfer")


def cpu() -> str:
    """What tells CPUs apart: caches are shared between unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(line for line in lines[:64] if line.startswith(("flags", "model")))
