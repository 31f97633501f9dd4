"""Tuning an EAGLE-3 head, and the folder it leaves behind."""

import csv
import functools
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from vllm_specinfer.draft_vocab import DRAFT_VOCAB_FILE
from vllm_specinfer.parse_sources import MANIFEST
from vllm_specinfer.results import write_json
from vllm_specinfer.tuning import eagle
from vllm_specinfer.tuning.data import TrainingData, prepare
from vllm_specinfer.tuning.eagle_copying import write_copy_heads
from vllm_specinfer.tuning.failures import in_a_sentence
from vllm_specinfer.tuning.plots import CURVES_FILE, plot_curves
from vllm_specinfer.tuning.precision import fast_dtype, training_device
from vllm_specinfer.tuning.readable import check_readable
from vllm_specinfer.tuning.settings import HeadSettings
from vllm_specinfer.tuning.states import STATES_FILE, write_states
from vllm_specinfer.tuning.training import fit

HEAD = "head"
CHECKPOINTS = "checkpoints"
# Continuations that the readout of the copy heads is fitted to.
COPY_EXAMPLES = 200


@in_a_sentence()
def tune_head(out: Path, settings: HeadSettings) -> list[float]:
    """Tune a head, or go on with one.

    Args:
        out: The folder; the head itself is `out / HEAD`, for vLLM's method "eagle3",
            too.
        settings: What to tune.

    Returns:
        Per depth: part of the validation tokens that are the head's likeliest.

    Raises:
        ValueError: The input cannot be used.
        OSError: A file is missing or broken, or disk or memory are full.
    """
    from transformers import AutoConfig, AutoTokenizer

    # What cannot have a head is refused before its continuations are written.
    check_readable(settings.target)
    config = AutoConfig.from_pretrained(settings.target)
    if config.get_text_config() is not config:
        raise ValueError(
            "the target of an EAGLE-3 head must be a language model alone; got "
            f"{config.model_type!r} with other parts"
        )
    eagle.head_config(config)
    data = prepare(out, settings, AutoTokenizer.from_pretrained(settings.target))
    if not (out / MANIFEST).is_file():
        _make(out, settings, data)
    shutil.rmtree(out / CHECKPOINTS, ignore_errors=True)
    (out / STATES_FILE).unlink(missing_ok=True)
    return json.loads((out / MANIFEST).read_text())["hit_rates"]


def _make(out: Path, settings: HeadSettings, data: TrainingData) -> None:
    """Train the head and write it."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(
        settings.target, dtype=fast_dtype(training_device())
    )
    head, losses, rates = train(out, target, settings, data)
    write_head(out / HEAD, head, data.draft_vocab if settings.draft_vocab else None)
    _write_curves(out, losses, rates)
    # Last: what it names is whole.
    write_json(out / MANIFEST, {"ssms": [{"model": HEAD}], "hit_rates": rates})


def train(
    out: Path, target: nn.Module, settings: HeadSettings, data: TrainingData
) -> tuple[eagle.EagleHead, list[tuple[int, float]], list[float]]:
    """Train a new head, going on from what is in the folder.

    Args:
        out: Keeps the target's states and checkpoints.
        target: A transformers causal language model.
        settings: How to train.
        data: On what.

    Returns:
        The head, its steps and losses, and its hit rate per depth.
    """
    target.to(training_device())
    torch.manual_seed(settings.seed)
    head = eagle.EagleHead(eagle.head_config(target.config.get_text_config()))
    eagle.start_from_last_layer(head, target)
    # Validation first: the order of the prompts.
    read = torch.compile(target.base_model, dynamic=True)
    states = write_states(
        out / STATES_FILE,
        read if settings.compile else target.base_model,
        head.config.eagle_aux_hidden_state_layer_ids,
        data.validation + data.training,
    )
    held_out = len(data.validation)
    if target.config.get_text_config().tie_word_embeddings:
        examples = range(held_out, min(held_out + COPY_EXAMPLES, len(states)))
        write_copy_heads(head, target, [states[i] for i in examples])
    head.to(target.device)
    teacher = eagle.Teacher(
        target, torch.tensor(data.draft_vocab, device=target.device)
    )
    if settings.compile:
        head.unroll = torch.compile(head.unroll, dynamic=True)
    losses = fit(
        head,
        functools.partial(eagle.loss, teacher=teacher, num_steps=settings.unroll),
        states.part(held_out, None),
        eagle.collate,
        settings,
        out / CHECKPOINTS,
    )
    rates = eagle.hits(
        head,
        teacher,
        states.part(0, held_out),
        settings.batch_size,
        settings.unroll,
    )
    return head, losses, rates


def write_head(
    folder: Path, head: eagle.EagleHead, draft_vocab: list[int] | None
) -> None:
    """Write the checkpoint folder, the whole of it or nothing.

    Args:
        folder: The folder.
        head: The head.
        draft_vocab: Tokens that it drafts; None for all.
    """
    config, weights = eagle.checkpoint(head)
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    write_json(unfinished / "config.json", config)
    file = unfinished / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes files that only their owner can read
    if draft_vocab is not None:
        write_json(unfinished / DRAFT_VOCAB_FILE, {"tokens": draft_vocab})
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def _write_curves(
    out: Path, losses: list[tuple[int, float]], rates: list[float]
) -> None:
    with (out / CURVES_FILE).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss", "depth", "hit_rate"])
        writer.writerows([step, loss, "", ""] for step, loss in losses)
        writer.writerows(["", "", d, rate] for d, rate in enumerate(rates, start=1))
    chances = [math.prod(rates[: d + 1]) for d in range(len(rates))]
    plot_curves(
        out, {HEAD: losses}, ("one more", rates), ("all so far", chances), "depth"
    )
