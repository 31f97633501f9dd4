"""What replaces names of vLLM."""

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_specinfer_original"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put a function around one of vLLM's; again does nothing.

    Args:
        owner: The class or module that has it.
        name: Its name there.
        around: Gets the original, then the arguments of a call.
    """
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(wrapped, _MARK, original)
    setattr(owner, name, wrapped)
