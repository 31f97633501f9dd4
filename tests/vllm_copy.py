"""Copies of the installed vLLM with other Python files, compiled files linked.

    python -m tests.vllm_copy FOLDER WHEEL

puts a vLLM of another version into FOLDER: its Python files come from WHEEL, the rest
from the installed CPU build. So tests run on a version that has no CPU build, as far as
its Python files and the compiled ones fit:

    PYTHONPATH=FOLDER:$PWD python -m pytest tests/e2e/test_greedy.py
"""

import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

INSTALLED = Path(importlib.util.find_spec("vllm").origin).parents[1]


def link(folder: Path, copied: Iterable[str]) -> None:
    """The installed vLLM in `folder`, all links but for some files.

    Args:
        folder: Where ``vllm`` is made.
        copied: Files that may be changed, as ``vllm/...``.
    """
    copies = {INSTALLED / name for name in copied}
    folders = {parent for file in copies for parent in file.parents}

    def make(source: Path) -> None:
        target = folder / source.relative_to(INSTALLED)
        if source in copies:
            shutil.copy(source, target)
        elif source not in folders:
            target.symlink_to(source)
        else:
            target.mkdir()
            for inner in source.iterdir():
                # Links there would have Python write into the installation.
                if inner.name != "__pycache__":
                    make(inner)

    make(INSTALLED / "vllm")
    # As `overlay` makes it; the CPU build's own distribution has another name.
    for metadata in INSTALLED.glob("vllm-*.dist-info"):
        (folder / metadata.name).symlink_to(metadata)


def overlay(folder: Path, wheel: Path) -> None:
    """The Python files of a wheel among the other files of the installed vLLM."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith("vllm/") and name.endswith(".py"):
                archive.extract(name, folder)
    for file in (INSTALLED / "vllm").rglob("*"):
        target = folder / file.relative_to(INSTALLED)
        if file.is_file() and file.suffix not in (".py", ".pyc"):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file)
    # From its distribution's version vLLM knows that it is a CPU build.
    version = wheel.name.split("-")[1]
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sys.argv[2]))
