"""Types of command-line arguments, which say what is wrong before any work is done."""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_specinfer.options import METHOD
from vllm_specinfer.parse_sources import MANIFEST, is_hub_id


def at_least(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """Numbers of a kind, none of them smaller, or larger than the most."""

    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            bounds = f"at least {least}"
            if most < math.inf:
                bounds += f" and at most {most}"
            raise argparse.ArgumentTypeError(f"must be {what} of {bounds}; got {text}")
        return value

    return number


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        wanted = 'a JSON object such as {"dtype": "float32"}'
        raise argparse.ArgumentTypeError(f"must be {wanted}; got {text}")
    return value


def named_config(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON, a speculative config."""
    name, separator, config = text.partition("=")
    if not separator:
        wanted = 'NAME=JSON such as wide={"model": "SSM", "tree": "2,2,1"}'
        raise argparse.ArgumentTypeError(f"must be {wanted}; got {text}")
    return name, {"method": METHOD, **json_object(config)}


def model(text: str) -> str:
    """A folder that is there, or what may be a hub id."""
    folder = os.path.expanduser(text)
    if os.path.exists(folder):
        return folder
    if not is_hub_id(text):
        raise argparse.ArgumentTypeError(f"no such folder: {text}")
    return text


def target(text: str) -> str:
    """As `model`, and no pool."""
    found = model(text)
    if os.path.isfile(os.path.join(found, MANIFEST)):
        raise argparse.ArgumentTypeError(f"must be a model; got the pool {text}")
    return found


def out_file(text: str) -> Path:
    """A file that can be written; its folder need not exist."""
    path = Path(text)
    if os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"must be a file; got the folder {text}")
    _check_writable(path, path.parent)
    return path


def out_folder(text: str) -> Path:
    """A folder that can be written into; it need not exist."""
    path = Path(text)
    _check_writable(path, path)
    return path


def _check_writable(path: Path, folder: Path) -> None:
    """Something in a folder, or a folder itself, which need not exist."""
    try:
        path.exists()  # raises where no file can have such a name
        while not folder.exists():
            folder = folder.parent
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = f"must be writable; got {path}: {error.strerror}"
        raise argparse.ArgumentTypeError(reason) from None
