"""Fitting weights with transformers' Trainer, so that a killed run goes on."""

import ctypes
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import accelerate  # noqa: F401 - the Trainer would miss it when it is to begin
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from vllm_specinfer.tuning.settings import CHECKPOINT_COPIES, Training, check_disk


class Lengths(Protocol):
    """Rows to train on, and how long each of them is."""

    lengths: list[int]

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Any: ...


# The Trainer's, in each checkpoint.
STATE_FILE = "trainer_state.json"
# Of mallopt (malloc.h).
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
INT_MAX = 2**31 - 1
# Steps after which the pieces of memory go back that fit no tensor any more.
TRIM_STEPS = 20

Loss = Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]
MakeOptimizer = Callable[[torch.nn.Module, float, float], torch.optim.Optimizer]


def fit(
    module: torch.nn.Module,
    loss: Loss,
    data: Lengths,
    collate: Callable[[Any], dict[str, torch.Tensor]],
    settings: Training,
    folder: Path,
    make_optimizer: MakeOptimizer | None = None,
) -> list[tuple[int, float]]:
    """Lower a loss, going on from the last whole checkpoint in `folder`.

    Checkpoints of another batch size are dropped: their steps count other texts.

    Args:
        module: What is trained.
        loss: Its loss on a batch.
        data: What batches are made of; rows of like length go together.
        collate: Makes one.
        settings: Epochs, learning rate, batch size and seed.
        folder: For checkpoints.
        make_optimizer: Of a module, a learning rate and weight decay; AdamW by default.

    Returns:
        Steps and their training losses.

    Raises:
        OSError: The disk has no room for checkpoints.
    """
    begun = last_checkpoint(folder)
    if begun is not None and _batch_size(begun) != settings.batch_size:
        print("with another batch size training begins anew", flush=True)
        shutil.rmtree(folder)
        begun = None
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(p.numel() for p in module.parameters()) * 4
    written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    check_disk(folder, size * CHECKPOINT_COPIES - written)
    memory = FreedMemory()
    steps = max(1, len(data) * settings.epochs // settings.batch_size)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=settings.epochs,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, steps // 10),
        weight_decay=0.01,
        max_grad_norm=1.0,
        logging_steps=max(1, steps // 50),
        save_steps=max(1, steps // 10),
        save_total_limit=2,
        seed=settings.seed,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    # On one GPU: the Trainer would copy the module to all that there are.
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1
    optimizer = make_optimizer and make_optimizer(
        module, arguments.learning_rate, arguments.weight_decay
    )
    trainer = _LossTrainer(
        model=module,
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        optimizers=(optimizer, None),
        callbacks=[memory],
        loss=loss,
        lengths=data.lengths,
    )
    trainer.train(resume_from_checkpoint=begun)
    logged = (row for row in trainer.state.log_history if "loss" in row)
    return [(row["step"], row["loss"]) for row in logged]


class FreedMemory(TrainerCallback):
    """Has the C library keep the memory of freed tensors for the next ones.

    By default it gives that of large ones back, and a third of a step on a CPU goes
    into the pages of new ones. Tensors of many sizes leave holes, so now and then what
    is free goes back after all.
    """

    def __init__(self) -> None:
        """Keep it from now on; another C library than GNU's is left alone."""
        library = ctypes.CDLL(None)
        self._trim = getattr(library, "malloc_trim", None)
        if self._trim is not None:
            library.mallopt(M_MMAP_MAX, 0)
            library.mallopt(M_TRIM_THRESHOLD, INT_MAX)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back what is free."""
        if self._trim is not None and state.global_step % TRIM_STEPS == 0:
            self._trim(0)


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that a kill did not cut off, if there is one."""
    whole = [
        (int(state.parent.name.rpartition("-")[2]), state.parent)
        for state in folder.glob(f"checkpoint-*/{STATE_FILE}")
        if _is_json(state)
    ]
    return str(max(whole)[1]) if whole else None


def _batch_size(checkpoint: str) -> int:
    return json.loads(Path(checkpoint, STATE_FILE).read_text())["train_batch_size"]


class _ByLength(LengthGroupedSampler):
    """An order of its own in each epoch, the same when a killed run goes on in one."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """An epoch begins, perhaps not with its first batch."""
        self.generator.manual_seed(hash((self._seed, epoch)))


class _LossTrainer(Trainer):
    def __init__(
        self, *args: Any, loss: Loss, lengths: list[int], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._loss, self._lengths = loss, lengths

    def _get_train_sampler(self, *args: Any) -> LengthGroupedSampler:
        # The Trainer's own one reads every row to find out its length.
        return _ByLength(self.args.train_batch_size, self._lengths, self.args.seed)

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return self._loss(model, inputs)


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True
