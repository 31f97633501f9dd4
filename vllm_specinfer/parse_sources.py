"""What proposes trees: SSMs, pools, n-grams and suffixes, parsed and found on disk."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_specinfer import checkpoints
from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.options import (
    SSM_TYPES,
    NgramSource,
    Source,
    SSMSource,
    SuffixSource,
    is_int,
)
from vllm_specinfer.parse_trees import check_limits, parse_num_nodes, parse_tree

MANIFEST = "manifest.json"
OWN_KEYS = ("type", "revision", "quantization")
SSM_KEYS = ("model", *OWN_KEYS, "tree", "num_speculative_tokens")
NGRAM_KEYS = ("model", "prompt_lookup_min", "prompt_lookup_max")
SUFFIX_KEYS = ("model", "max_tokens")
MAX_HUB_ID = 96
MODEL_FREE = (NgramSource.name, SuffixSource.name)


def parse_sources(config: Mapping[str, Any]) -> tuple[Source, ...]:
    """Parse the keys ``model`` and ``ssms``.

    Raises:
        ValueError: One sentence that says what must change.
    """
    model, ssms = config.get("model"), config.get("ssms")
    if model is not None and ssms is not None:
        raise ValueError("model and ssms must not both be given; got both")
    if model is None and ssms is None:
        raise ValueError(
            "model must name an SSM, a folder, a hub id, a pool, "
            f"{' or '.join(map(repr, MODEL_FREE))}; got none"
        )
    if model is not None:
        if not isinstance(model, str | os.PathLike):
            raise ValueError(f"model must be a string; got {model!r}")
        found = _parse_source(model, "model")
    elif isinstance(ssms, list | tuple):
        parsed = (_parse_source(raw, f"ssms[{i}]") for i, raw in enumerate(ssms))
        found = [source for sources in parsed for source in sources]
    else:
        raise ValueError(f"ssms must be a list; got {ssms!r}")
    if not found:
        raise ValueError("ssms must name at least one source; got none")
    return tuple(_with_each_lookup_once(found))


def _with_each_lookup_once(sources: list[Source]) -> list[Source]:
    """Pools may bring the same one.

    Raises:
        ValueError: There are two of a kind with different settings.
    """
    kept: list[Source] = []
    for source in sources:
        if isinstance(source, SSMSource) or source not in kept:
            kept.append(source)
    names = [source.name for source in kept if not isinstance(source, SSMSource)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"ssms, with what is in pools, must have one {name!r}; got two with "
                "different settings"
            )
    return kept


def _parse_source(raw: Any, where: str) -> list[Source]:
    """One entry; a pool is several sources."""
    entry = {"model": raw} if isinstance(raw, str | os.PathLike) else raw
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where} must be a string or an object; got {raw!r}")
    name = entry.get("model")
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if name == NgramSource.name:
        return [_parse_ngram(entry, where)]
    if name == SuffixSource.name:
        return [_parse_suffix(entry, where)]
    refuse_unknown_keys(entry, SSM_KEYS, where)
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{where} must name a model; got {name!r}")
    for key in ("revision", "quantization"):
        if not isinstance(entry.get(key), str | None):
            raise ValueError(f"{where}.{key} must be a string; got {entry[key]!r}")
    tree = None if entry.get("tree") is None else parse_tree(entry["tree"])
    num_nodes = parse_num_nodes(entry.get("num_speculative_tokens"), f"{where}.")
    if tree is not None and num_nodes is not None:
        check_limits(tree, num_nodes, f"{where}.")
    if entry.get("type") not in (None, *SSM_TYPES):
        raise ValueError(
            f"{where}.type must be one of {', '.join(SSM_TYPES)}; got {entry['type']!r}"
        )
    own: dict[str, Any] = {key: entry.get(key) for key in OWN_KEYS}
    own |= {"tree": tree, "num_speculative_tokens": num_nodes}
    manifest = _expanded(name) / MANIFEST
    if os.path.isfile(manifest):
        members = _read_manifest(manifest)
        return [
            replace(m, **{k: v for k, v in own.items() if v is not None})
            if isinstance(m, SSMSource)
            else m
            for m in members
        ]
    return [SSMSource(_resolve_model(name, where), **own)]


def _parse_ngram(entry: Mapping[str, Any], where: str) -> NgramSource:
    """As vLLM: one bound given stands for both."""
    refuse_unknown_keys(entry, NGRAM_KEYS, where)
    bounds: list[Any] = [entry.get(key) for key in NGRAM_KEYS[1:]]
    for key, value in zip(NGRAM_KEYS[1:], bounds, strict=True):
        if value is not None and (not is_int(value) or value < 1):
            raise ValueError(f"{where}.{key} must be a positive integer; got {value!r}")
    least, most = bounds
    if least is None and most is None:
        return NgramSource()
    source = NgramSource(*(b or least or most for b in bounds))
    if source.prompt_lookup_min > source.prompt_lookup_max:
        raise ValueError(
            f"{where}.prompt_lookup_min must be at most prompt_lookup_max; got {least} "
            f"and {most}"
        )
    return source


def _parse_suffix(entry: Mapping[str, Any], where: str) -> SuffixSource:
    refuse_unknown_keys(entry, SUFFIX_KEYS, where)
    most = entry.get("max_tokens")
    if most is None:
        return SuffixSource()
    if not is_int(most) or most < 0:
        raise ValueError(
            f"{where}.max_tokens must be an integer of at least 0; got {most!r}"
        )
    return SuffixSource(most)


def _resolve_model(name: str, where: str) -> str:
    """A folder as it is, or a hub id."""
    folder = _expanded(name)
    # Of os.path, as pathlib raises where a name is too long or holds a null.
    if not os.path.exists(folder):
        if is_hub_id(name):
            return name
        raise ValueError(
            f"{where} must be an existing folder or a hub id; got {name!r}"
        )
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{where} must be a whole model; got a LoRA adapter, {name!r}")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise ValueError(
            f"{where} must be a folder with config.json or {MANIFEST}; got {name!r}"
        )
    if (reason := checkpoints.broken_reason(folder)) is not None:
        raise ValueError(reason)
    return str(folder)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no folder may be one on the hub."""
    matches = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name, re.ASCII)
    return matches is not None and len(name) <= MAX_HUB_ID


def _expanded(name: str) -> Path:
    return Path(os.path.expanduser(name))


def _read_manifest(manifest: Path) -> list[Source]:
    """The members of a pool: entries as in ``ssms``, folders beside the manifest."""
    try:
        content = json.loads(manifest.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{manifest} must be JSON; got {error}") from error
    entries = content.get("ssms") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("model"), str)
        for entry in entries
    ):
        raise ValueError(
            f'{manifest} must hold {{"ssms": [{{"model": "..."}}]}}; got {content!r}'
        )
    members: list[Source] = []
    for i, entry in enumerate(entries):
        if entry["model"] not in MODEL_FREE:
            entry = {**entry, "model": str(_member(manifest, entry["model"]))}
        members += _parse_source(entry, f"{manifest}: ssms[{i}]")
    return members


def _member(manifest: Path, name: str) -> Path:
    """The folder of a pool's member, which may be another's work: nothing but weights.

    Raises:
        ValueError: It is not there, not inside the pool, or not safe to load.
    """
    folder = manifest.parent / name
    if not os.path.isfile(folder / "config.json"):
        raise ValueError(f"{manifest} must name folders with config.json; got {folder}")
    pool = manifest.parent.resolve()
    # A pool in Hugging Face's cache has its files there, one for all revisions.
    homes = {pool, pool.parents[1] / "blobs"} if len(pool.parents) > 1 else {pool}
    files = (folder, *folder.iterdir())
    outside = [f for f in files if homes.isdisjoint(f.resolve().parents)]
    if outside or os.path.isfile(folder / MANIFEST):
        found = outside[0] if outside else folder / MANIFEST
        raise ValueError(f"{manifest} must name models inside its folder; got {found}")
    if (reason := checkpoints.unsafe_reason(folder)) is not None:
        raise ValueError(reason)
    return folder
