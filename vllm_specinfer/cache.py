"""Where things are kept that every engine of a machine can use again."""

import platform
from pathlib import Path

from vllm import envs


def cache_folder() -> Path:
    """Our part of vLLM's cache; it may not exist yet."""
    return Path(envs.VLLM_CACHE_ROOT, "specinfer")


def cpu() -> str:
    """What tells CPUs apart: caches are shared between unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "model", "Features", "CPU")  # the latter two on ARM
    return "".join(line for line in lines[:64] if line.startswith(kinds))
