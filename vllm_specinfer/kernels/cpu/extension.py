"""Builds the C++ kernels on first use and keeps them for later processes."""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from vllm_specinfer.cache import cache_folder, cpu

logger = logging.getLogger(__name__)

_NAME = "specinfer_cpu"
_SOURCES = Path(__file__).parent
# How names of folders that builds work in begin, and after how many seconds none does.
_UNFINISHED = f"{_NAME}-unfinished-"
_LONGEST_BUILD = 3600
# Compiled side by side; each includes the sources that it binds.
_UNITS = sorted(_SOURCES.glob("*bindings.cpp"))
# The one that defines what compiled models call.
OPERATORS = _SOURCES / "linear_bindings.cpp"
_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
)


@lru_cache(maxsize=1)
def load() -> ModuleType | None:
    """The compiled kernels, or None where no C++ compiler can build them.

    The first call on a machine compiles for half a minute or so, and other processes,
    such as ranks, wait for it. A build is written under a temporary name and renamed;
    what one that is killed leaves behind, a later one deletes.
    """
    try:
        path = _library()
        kernels = _built(path)
        if kernels is None:
            with _alone_in(path.parent):
                kernels = _built(path)
                if kernels is None:
                    _delete_unfinished(path.parent)
                    _build(path)
                    kernels = _import(path)
        return kernels
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "The C++ kernels of specinfer could not be built; tree attention and the "
            "KV commit run in plain torch, which is slower: %s",
            detail[-2000:],
        )
        return None


def _library() -> Path:
    """Where the library of these sources, this torch and this CPU lives."""
    key = hashlib.sha256()
    for source in sorted(_SOURCES.glob("*.cpp")):
        key.update(source.read_bytes())
    key.update(repr((_FLAGS, torch.__version__, sys.version, cpu())).encode())
    return cache_folder() / f"{_NAME}-{key.hexdigest()[:16]}.so"


def _built(path: Path) -> ModuleType | None:
    """The library, if it is there and loads."""
    if not path.exists():
        return None
    try:
        return _import(path)
    except ImportError as error:
        # Built against another libstdc++, or what a crash has left.
        logger.warning("Building the C++ kernels anew: %s", error)
        return None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process is in here, where the file system can tell."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _delete_unfinished(folder: Path) -> None:
    """What builds have left that were killed, on this machine or another."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):  # someone else has deleted it
            if time.time() - left.stat().st_mtime > _LONGEST_BUILD:
                shutil.rmtree(left)


def _build(path: Path) -> None:
    # Imported here: it costs as much as the rest of this module together.
    from torch.utils.cpp_extension import include_paths

    includes = [*include_paths(), sysconfig.get_paths()["include"]]
    libraries = Path(torch.__file__).parent / "lib"
    compiler = [*shlex.split(os.environ.get("CXX") or "g++"), *_FLAGS]
    with (
        tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=path.parent) as folder,
        ThreadPoolExecutor(len(_UNITS)) as threads,
    ):
        compile_unit = [
            *compiler,
            f"-DTORCH_EXTENSION_NAME={_NAME}",
            *(f"-I{include}" for include in includes),
            "-c",
        ]
        logger.info("Building the C++ kernels of specinfer: %s", " ".join(compile_unit))
        objects = [f"{folder}/{unit.stem}.o" for unit in _UNITS]
        compiled = threads.map(
            lambda unit, made: _run(*compile_unit, str(unit), "-o", made),
            _UNITS,
            objects,
        )
        list(compiled)
        output = Path(folder, path.name)
        _run(
            *compiler,
            "-shared",
            *objects,
            "-o",
            str(output),
            f"-L{libraries}",
            *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        )
        with output.open("rb") as written:
            os.fsync(written)
        os.replace(output, path)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
