"""Whether a folder's weights can be read, and are nothing but weights."""

import json
from pathlib import Path

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")


def broken_reason(folder: Path) -> str | None:
    """Why a folder's safetensors files cannot be loaded, or None.

    Only headers and file sizes are read. A folder without weights is not broken.
    """
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text("utf-8"))
            shards = {str(shard) for shard in index["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return (
                f"{folder / INDEX} must be JSON with a weight_map; got something else"
            )
        for shard in sorted(shards):
            if Path(shard).name != shard or not (folder / shard).is_file():
                return (
                    f"{folder} must hold every shard of its {INDEX}; got none of the "
                    f"name {shard!r}"
                )
    for file in sorted(folder.glob("*.safetensors")):
        if (error := _safetensors_error(file)) is not None:
            return f"{file} must be a whole safetensors file; got {error}"
    return None


def unsafe_reason(folder: Path) -> str | None:
    """Why a folder that came with a pool is not to be loaded, or None."""
    pickles = [f.name for f in sorted(folder.iterdir()) if f.suffix in PICKLES]
    if pickles:
        return (
            f"{folder} must hold weights as safetensors only, a pickle can run code; "
            f"got {', '.join(pickles)}"
        )
    if not any(folder.glob("*.safetensors")):
        return f"{folder} must hold weights as safetensors; got none"
    return None


def _safetensors_error(file: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy"):
            return None
    except (OSError, SafetensorError) as error:
        return str(error).split("\n")[0]
