"""What pools and heads are trained with, and the checks before an hour is spent.

Standard library only at import.
"""

import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from vllm_specinfer.results import made_by, write_json

SETTINGS_FILE = "tuning.json"
PROMPTS_HASH, VOCAB_HASH = "prompts_sha256", "vocab_sha256"
# Settings that may change on the way: what is written by then stays right. The prompts
# file counts by its content.
FREE = ("prompts", "batch_size", "num_ssms", "compile")
# Arguments of an engine that say what memory it takes, and not what it writes.
FREE_OF_ENGINE = (
    "cpu_offload_gb",
    "enforce_eager",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_batched_tokens",
    "max_num_seqs",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)
# Free disk to train something, in times of its float32 weights: optimiser state and one
# older checkpoint.
CHECKPOINT_COPIES = 8
# Learning rates of SSMs.
NEW_RATE, BASE_RATE = 2e-3, 3e-4


@dataclass(frozen=True)
class Training:
    """What every kind of source is trained with.

    Attributes:
        target: Folder or hub id of the target.
        prompts: JSONL or text file of prompts.
        draft_vocab: Rows of the reduced head, the commonest tokens; 0 for all.
        max_prompts: Most prompts to use; 0 for all.
        max_tokens: Tokens of each continuation.
        epochs: Passes over the continuations.
        learning_rate: At its highest, with cosine decay.
        batch_size: Continuations per optimiser step.
        validation: Part of the prompts, the first ones, held out for the curves.
        seed: Of the order and the new weights.
        engine: Further arguments of the `vllm.LLM` that writes the continuations.
    """

    target: str
    prompts: str
    draft_vocab: int = 8192
    max_prompts: int = 0
    max_tokens: int = 128
    epochs: int = 2
    learning_rate: float = 1e-3
    batch_size: int = 16
    validation: float = 0.05
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)

    # Whether the target's likeliest tokens are kept of every token.
    labels: ClassVar[bool] = False
    # Whether what is trained reads inner states of the target.
    reads_layers: ClassVar[bool] = False
    # Fields that count something.
    _counts: ClassVar[tuple[str, ...]] = ("max_tokens", "epochs", "batch_size")

    def __post_init__(self) -> None:
        for name in self._counts:
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        for name in ("draft_vocab", "max_prompts", "seed"):
            value = getattr(self, name)
            if value < 0:
                raise ValueError(f"{name} must be at least 0; got {value}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(
                f"learning_rate must be a positive number; got {self.learning_rate}"
            )
        if not 0 < self.validation < 1:
            raise ValueError(
                f"validation must be between 0 and 1; got {self.validation}"
            )


@dataclass(frozen=True)
class PoolSettings(Training):
    """One pool of SSMs; an epoch is a pass over what is unmarked.

    Attributes:
        learning_rate: At its highest; 0: `NEW_RATE`, or `BASE_RATE` with a base.
        num_ssms: Rounds of boost-tuning, an SSM each.
        base: Folder of the SSM to start every round from; None for a new one.
        keep_base: The base is the pool's first SSM as it is, so one round is no more
            than marking what it continues already.
        layers: Layers of a new SSM, two of which begin by copying from the context.
        hidden: Hidden size of a new SSM, a multiple of 32; 65 channels serve copying.
        compare_length: Tokens of a window: it is marked once an SSM continues all of
            it as the target does.
    """

    epochs: int = 4
    learning_rate: float = 0.0
    num_ssms: int = 2
    base: str | None = None
    keep_base: bool = False
    layers: int = 3
    hidden: int = 224
    compare_length: int = 4

    labels = True
    _counts = (*Training._counts, "num_ssms", "compare_length")

    def __post_init__(self) -> None:
        if not self.learning_rate:
            rate = NEW_RATE if self.base is None else BASE_RATE
            object.__setattr__(self, "learning_rate", rate)
        super().__post_init__()
        if self.layers < 2:
            raise ValueError(f"layers must be at least 2; got {self.layers}")
        if self.hidden < 160 or self.hidden % 32:
            raise ValueError(
                f"hidden must be a multiple of 32 and at least 160; got {self.hidden}"
            )
        if self.keep_base and self.base is None:
            raise ValueError("keep_base needs a base; got none")
        if self.compare_length > self.max_tokens:
            raise ValueError(
                f"compare_length must be at most max_tokens ({self.max_tokens}); got "
                f"{self.compare_length}"
            )


@dataclass(frozen=True)
class HeadSettings(Training):
    """One EAGLE-3 head.

    Attributes:
        unroll: Depths that are trained: the head's own states feed all but the first.
        compile: Compile the target and the head: minutes at the start, twice the speed.
    """

    unroll: int = 3
    compile: bool = False

    reads_layers = True
    _counts = (*Training._counts, "unroll")


def open_folder(out: Path, settings: Training, vocab: Mapping[str, int]) -> None:
    """Begin a folder, or go on with one of the same settings, prompts and tokenizer.

    `FREE` settings and arguments may be others: that is said, and recorded.

    Args:
        out: The folder.
        settings: Of what is trained.
        vocab: Token ids of the target's tokenizer.

    Raises:
        ValueError: The folder holds something else, or another process tunes in it.
        OSError: The prompts file is missing.
    """
    file = out / SETTINGS_FILE
    prompts = hashlib.sha256(Path(settings.prompts).read_bytes())
    tokens = hashlib.sha256(repr(sorted(vocab.items())).encode())
    wanted = {
        **{name: _real(name, value) for name, value in asdict(settings).items()},
        PROMPTS_HASH: prompts.hexdigest(),
        VOCAB_HASH: tokens.hexdigest(),
    }
    earlier: list[Any] = []
    if out.exists():
        _stay_alone(out)
    if file.is_file():
        try:
            record = json.loads(file.read_text())
            had, given = record["settings"], _deciding(record["settings"])
            earlier = [*record.pop("earlier", []), record]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file} must be as it was written; got {error!r}"
            ) from error
        if had == wanted:
            return
        begun = any(other.name != SETTINGS_FILE for other in out.iterdir())
        different = [n for n, v in _deciding(wanted).items() if given.get(n) != v]
        if had.get("num_ssms", 0) > wanted.get("num_ssms", 0):
            different.append("num_ssms")  # whoever uses the pool would miss one
        if different == [PROMPTS_HASH] and begun:
            raise ValueError(
                f"{settings.prompts} must be as it was when {out} was begun; got "
                "another content"
            )
        if different == [VOCAB_HASH] and begun:
            raise ValueError(
                f"the tokenizer of {settings.target} must be as it was when {out} was "
                "begun; got other tokens"
            )
        changed = different or [n for n, v in wanted.items() if had.get(n) != v]
        changes = ", ".join(
            f"{name} {had.get(name)!r} -> {wanted[name]!r}" for name in changed
        )
        if different and begun:
            raise ValueError(
                f"{out} was begun with other settings ({changes}); use the same or "
                "another folder"
            )
        if begun:
            print(f"{out} keeps what it has and goes on with {changes}", flush=True)
    # What a kill has left of the first file is hidden.
    elif out.exists() and any(not file.name.startswith(".") for file in out.iterdir()):
        raise ValueError(f"{out} must be empty or begun before; got other files")
    out.mkdir(parents=True, exist_ok=True)
    _stay_alone(out)
    write_json(file, {"settings": wanted, **made_by(), "earlier": earlier})


@functools.cache
def _stay_alone(out: Path) -> None:
    """Keep others from a folder until this process ends: they would write into it, too.

    Raises:
        ValueError: Another process is in it.
    """
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise ValueError(
            f"{out} must have one command at a time; got another that still tunes"
        ) from None
    except OSError:  # of file systems without locks
        os.close(folder)


def _deciding(settings: dict[str, Any]) -> dict[str, Any]:
    """Of recorded settings those that all that is written depends on."""
    engine = {n: v for n, v in settings["engine"].items() if n not in FREE_OF_ENGINE}
    return {n: v for n, v in settings.items() if n not in FREE} | {"engine": engine}


def _real(name: str, value: Any) -> Any:
    """A setting as it is recorded: of a model's folder, the one that links lead to."""
    is_folder = name in ("target", "base") and value and os.path.isdir(value)
    return os.path.realpath(value) if is_folder else value


def check_disk(folder: Path, num_bytes: int) -> None:
    """Raises OSError where a folder's disk has less than that free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(
            f"{folder} needs {num_bytes / 1e6:.0f} MB of free disk; got "
            f"{free / 1e6:.0f} MB"
        )
