"""Unknown keys, with a hint at the one that was meant."""

import difflib
from collections.abc import Mapping
from typing import Any


def refuse_unknown_keys(
    config: Mapping[str, Any], known: tuple[str, ...], where: str
) -> None:
    """Raise ValueError for the first key of `config` that is not in `known`."""
    for key in config:
        if key in known:
            continue
        close = difflib.get_close_matches(str(key), known, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{where} keys must be among {', '.join(known)}; got {key!r}{hint}"
        )
