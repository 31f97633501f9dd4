"""What a budget has learned, kept from one engine to the next.

One small file per target, sources, hardware, settings and state of this package's
kernels, beside vLLM's other caches. It only saves the first steps of an engine from
guessing: what is wrong is unlearned.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_specinfer.cache import cache_folder, cpu
from vllm_specinfer.ranks import is_first_rank, of_first_rank
from vllm_specinfer.results import write_json

if TYPE_CHECKING:
    from vllm_specinfer.drafting.experience import Experience

logger = init_logger(__name__)

# Whose times are learned; after an upgrade they may be others.
_KERNELS = Path(__file__).parents[1] / "kernels"
# What the budget has learned is saved every so many steps.
SAVE_STEPS = 500


class BudgetMemory:
    """What the sources of one engine have learned, and the file of it."""

    def __init__(self, file: Path, experience: "Experience") -> None:
        """Start from what is in the first rank's file, if anything is."""
        self._file, self._experience = file, experience
        self._num_steps = 0
        learned = of_first_rank(load(file))
        if learned is not None:
            try:
                experience.recall(learned)
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("%s is not used: %s", file, error)

    def note_step(self) -> None:
        """Now and then, keep what the budget has learned for later engines."""
        self._num_steps += 1
        if self._num_steps % SAVE_STEPS == 0 and is_first_rank():
            save(self._file, self._experience.learned())


def file_of(*circumstances: Any) -> Path:
    """The file for engines in these circumstances, on this machine."""
    key = hashlib.sha256(repr((circumstances, cpu(), os.cpu_count())).encode())
    for source in sorted([*_KERNELS.rglob("*.cpp"), *_KERNELS.rglob("*.py")]):
        key.update(source.read_bytes())
    return cache_folder() / f"budget-{key.hexdigest()[:16]}.json"


def load(file: Path) -> dict[str, Any] | None:
    """What was saved, or None where there is nothing that can be read."""
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def save(file: Path, state: dict[str, Any]) -> None:
    """Replace the file as a whole; a disk that is full or read-only is logged once."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, state)
    except OSError as error:
        # Without the file, which has another name each time.
        logger.warning_once(
            "What the budget has learned could not be saved in %s: %s",
            *(file.parent, error.strerror or error),
        )
