"""What proposes trees: SSM folders, hub ids and pools, parsed and found on disk."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.options import SSMSource

MANIFEST = "manifest.json"
SSM_KEYS = ("model", "revision", "quantization")
MODEL_FREE_SOURCES = ("ngram", "suffix")


def parse_sources(config: Mapping[str, Any]) -> tuple[SSMSource, ...]:
    """Parse the keys ``model`` and ``ssms``; this version wants exactly one SSM.

    Raises:
        ValueError: One sentence that says what must change.
    """
    model, ssms = config.get("model"), config.get("ssms")
    if model is not None and ssms is not None:
        raise ValueError("model and ssms must not both be given; got both")
    if model is None and ssms is None:
        raise ValueError(
            "model must name an SSM, a folder, a hub id or a pool; got none"
        )
    if model is not None:
        sources = _parse_source(model, "model")
    elif isinstance(ssms, list | tuple):
        sources = tuple(
            source
            for i, raw in enumerate(ssms)
            for source in _parse_source(raw, f"ssms[{i}]")
        )
    else:
        raise ValueError(f"ssms must be a list; got {ssms!r}")
    if len(sources) != 1:
        raise ValueError(
            "ssms must name exactly one SSM, this version supports no more; got "
            f"{len(sources)}"
        )
    return sources


def _parse_source(raw: Any, where: str) -> tuple[SSMSource, ...]:
    entry = {"model": raw} if isinstance(raw, str | os.PathLike) else raw
    if not isinstance(entry, Mapping) or where == "model" and entry is raw:
        kinds = "a string" if where == "model" else "a string or an object"
        raise ValueError(f"{where} must be {kinds}; got {raw!r}")
    refuse_unknown_keys(entry, SSM_KEYS, where)
    name = entry.get("model")
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{where} must name a model; got {name!r}")
    for key in ("revision", "quantization"):
        if not isinstance(entry.get(key), str | None):
            raise ValueError(f"{where}.{key} must be a string; got {entry[key]!r}")
    if name in MODEL_FREE_SOURCES:
        raise ValueError(
            f"{where} must be a neural SSM, this version supports one SSM and no "
            f"other source; got {name!r}"
        )
    return tuple(
        SSMSource(path, entry.get("revision"), entry.get("quantization"))
        for path in _resolve_model(name, where)
    )


def _resolve_model(name: str, where: str) -> list[str]:
    """The model folders behind a name: itself, or a pool's members."""
    folder = Path(name).expanduser()
    if not folder.exists():
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) and not name.startswith("."):
            return [name]
        raise ValueError(
            f"{where} must be an existing folder or a hub id; got {name!r}"
        )
    manifest = folder / MANIFEST
    if manifest.is_file():
        return _read_manifest(manifest)
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{where} must be a whole model; got a LoRA adapter, {name!r}")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(
            f"{where} must be a folder with config.json or {MANIFEST}; got {name!r}"
        )
    return [str(folder)]


def _read_manifest(manifest: Path) -> list[str]:
    try:
        content = json.loads(manifest.read_text())
    except ValueError as error:
        raise ValueError(f"{manifest} must be JSON; got {error}") from error
    entries = content.get("ssms") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("model"), str)
        for entry in entries
    ):
        raise ValueError(
            f'{manifest} must hold {{"ssms": [{{"model": "..."}}]}}; got {content!r}'
        )
    folders = [manifest.parent / entry["model"] for entry in entries]
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"{manifest} must name folders with config.json; got {folder}"
            )
    return [str(folder) for folder in folders]
