"""The SSM of one round: loaded or made new, trained on windows, asked what it hits.

Dimension legend: B continuations, T tokens of the longest, H hidden size, V' rows of
the reduced head.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.settings import Settings

HEAD_SIZE = 64
IGNORED = -100


def first_weights(settings: Settings) -> torch.nn.Module:
    """The base SSM, or a new Llama whose embedding is the target's, projected.

    Raises:
        ValueError: The base has another vocabulary than the target.
    """
    theirs = AutoConfig.from_pretrained(settings.target).get_text_config()
    if settings.base is not None:
        ssm = AutoModelForCausalLM.from_pretrained(settings.base, dtype=torch.float32)
        if ssm.config.vocab_size != theirs.vocab_size:
            raise ValueError(
                f"base must have the target's {theirs.vocab_size} tokens; got "
                f"{ssm.config.vocab_size} of {settings.base!r}"
            )
        return ssm
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=settings.hidden,
        intermediate_size=3 * settings.hidden,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden // HEAD_SIZE,
        num_key_value_heads=settings.hidden // HEAD_SIZE,
        head_dim=HEAD_SIZE,
        max_position_embeddings=theirs.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    ssm = LlamaForCausalLM(config)
    target = AutoModelForCausalLM.from_pretrained(settings.target, dtype=torch.float32)
    embedding = target.get_input_embeddings().weight.detach()
    if embedding.shape[1] >= settings.hidden:
        centred = embedding - embedding.mean(0)
        _, _, directions = torch.linalg.svd(centred, full_matrices=False)
        projected = centred @ directions[: settings.hidden].T
        scale = config.initializer_range / projected.std()
        with torch.no_grad():
            ssm.get_input_embeddings().weight.copy_(projected * scale)
    return ssm


class Windows(torch.utils.data.Dataset):
    """Continuations whose unmarked windows have a loss."""

    def __init__(
        self, samples: Sequence[Sample], marks: Sequence[np.ndarray], length: int
    ) -> None:
        """Keep the samples with something left to learn.

        Args:
            samples: [S] prompts and answers.
            marks: [S] bool per window of the answer: already continued by some SSM.
            length: Tokens of a window.
        """
        self._rows = []
        for sample, marked in zip(samples, marks, strict=True):
            if marked.all():
                continue
            known = np.repeat(marked, length)[: len(sample.answer)]
            labels = np.where(known, IGNORED, sample.answer)
            ids = sample.prompt + sample.answer
            self._rows.append((ids, [IGNORED] * len(sample.prompt) + labels.tolist()))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[list[int], list[int]]:
        return self._rows[i]


def collate(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Padded input_ids and labels, [B, T] each; padding is at the end."""
    length = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    for i, (tokens, wanted) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(tokens)] = torch.tensor(wanted)
    return {"input_ids": ids, "labels": labels}


class WindowTrainer(Trainer):
    """transformers' Trainer with a loss over the reduced head's rows only."""

    def __init__(self, *args: Any, draft_vocab: torch.Tensor, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._draft_vocab = draft_vocab

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Cross-entropy of the wanted tokens that the reduced head has."""
        logits, wanted = wanted_logits(model, inputs, self._draft_vocab)
        return cross_entropy(logits, wanted) if len(wanted) else logits.sum() * 0


def wanted_logits(
    model: Any, inputs: dict[str, torch.Tensor], draft_vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V'] where a token is wanted, and its row [n] of the reduced head."""
    draft_vocab = draft_vocab.to(inputs["labels"].device)
    labels = inputs["labels"][:, 1:]
    place = torch.searchsorted(draft_vocab, labels.clamp(min=0))
    place = place.clamp(max=len(draft_vocab) - 1)
    known = (labels != IGNORED) & (draft_vocab[place] == labels)
    hidden = model.base_model(input_ids=inputs["input_ids"]).last_hidden_state
    rows = model.get_output_embeddings().weight[draft_vocab]
    return hidden[:, :-1][known] @ rows.T, place[known]


@torch.inference_mode()
def hits(
    ssm: torch.nn.Module,
    samples: Sequence[Sample],
    draft_vocab: torch.Tensor,
    batch_size: int,
) -> list[np.ndarray]:
    """Per sample [answer] bool: the SSM's likeliest token is the target's.

    Reading the target's own text gives what the SSM would write by itself, up to the
    first token at which the two part.
    """
    ssm.eval()
    found: list[np.ndarray] = []
    device = next(ssm.parameters()).device
    for start in tqdm(range(0, len(samples), batch_size), desc="reading"):
        batch = samples[start : start + batch_size]
        rows = [
            (s.prompt + s.answer, [IGNORED] * len(s.prompt) + s.answer) for s in batch
        ]
        inputs = {name: value.to(device) for name, value in collate(rows).items()}
        labels = inputs["labels"][:, 1:]
        right = torch.zeros(labels.shape, dtype=torch.bool)
        logits, wanted = wanted_logits(ssm, inputs, draft_vocab)
        known = labels[labels != IGNORED]
        drafted = torch.isin(known, draft_vocab.to(device))
        of_wanted = torch.zeros(len(known), dtype=torch.bool, device=device)
        of_wanted[drafted] = logits.argmax(-1) == wanted
        right[(labels != IGNORED).cpu()] = of_wanted.cpu()
        for i, sample in enumerate(batch):
            first = len(sample.prompt) - 1
            found.append(right[i, first : first + len(sample.answer)].numpy())
    return found


def windows_hit(hit: np.ndarray, length: int) -> np.ndarray:
    """[windows] bool: every token of the window is hit; the last one may be short."""
    padded = np.pad(hit, (0, -len(hit) % length), constant_values=True)
    return padded.reshape(-1, length).all(axis=1)


class Losses(TrainerCallback):
    """Notes the training loss of each logged step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by the Trainer."""
        logged = [r for r in state.log_history if "loss" in r]
        self.rows = [(r["step"], r["loss"]) for r in logged]


def train(
    ssm: torch.nn.Module,
    data: Windows,
    settings: Settings,
    draft_vocab: torch.Tensor,
    folder: Path,
) -> list[tuple[int, float]]:
    """Fit one SSM, going on from its last whole checkpoint in `folder`.

    Returns:
        Steps and their training losses.
    """
    steps = max(1, len(data) * settings.epochs // settings.batch_size)
    losses = Losses()
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
        bf16=torch.cuda.is_available(),
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = WindowTrainer(
        model=ssm,
        args=arguments,
        train_dataset=data,
        data_collator=collate,
        callbacks=[losses],
        draft_vocab=draft_vocab,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    return losses.rows


def last_checkpoint(folder: Path) -> str | None:
    """The newest checkpoint that a kill did not cut off, if there is one."""
    whole = [
        (int(state.parent.name.rpartition("-")[2]), state.parent)
        for state in folder.glob("checkpoint-*/trainer_state.json")
        if _is_json(state)
    ]
    return str(max(whole)[1]) if whole else None


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text())
    except ValueError:
        return False
    return True
