"""The SSM of one round: loaded or made new, trained on windows, asked what it hits.

Dimension legend: B continuations, T tokens of the longest, H hidden size, V' rows of
the reduced head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_specinfer.tuning.data import Sample
from vllm_specinfer.tuning.new_ssm import NewSSM, fast_attention
from vllm_specinfer.tuning.settings import PoolSettings

IGNORED = -100
# Part of a new SSM's batches that keep what it copies by.
REPEATED = 0.15


def first_weights(settings: PoolSettings) -> torch.nn.Module:
    """The base SSM, or a new one that shares the target's embedding.

    Raises:
        ValueError: The base has another vocabulary than the target.
    """
    torch.manual_seed(settings.seed)
    if settings.base is None:
        target = AutoModelForCausalLM.from_pretrained(
            settings.target, dtype=torch.bfloat16
        )
        embedding = target.get_input_embeddings().weight.detach().float()
        return NewSSM(embedding, settings.target, settings.hidden, settings.layers)
    theirs = AutoConfig.from_pretrained(settings.target).get_text_config()
    ssm = AutoModelForCausalLM.from_pretrained(
        settings.base, dtype=torch.float32, attn_implementation=fast_attention()
    )
    if ssm.config.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"base must have the target's {theirs.vocab_size} tokens; got "
            f"{ssm.config.vocab_size} of {settings.base!r}"
        )
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
        self.lengths = [len(ids) for ids, _ in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> tuple[list[int], list[int]]:
        return self._rows[i]


def collate(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    """Padded input_ids and labels, [B, T] each; padding is at the end."""
    ids, labels = (list(map(torch.tensor, part)) for part in zip(*rows, strict=True))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def collate_for_new(
    rows: Sequence[tuple[list[int], list[int]]],
) -> dict[str, torch.Tensor]:
    """As `collate`; now and then their tokens, shuffled, in texts that repeat
    themselves, which have a loss from the second time on."""
    inputs = collate(rows)
    length = inputs["input_ids"].shape[1]
    if length < 4 or torch.rand(()) >= REPEATED:
        return inputs
    period = int(torch.randint(length // 4, length // 2 + 1, ()))
    ids = inputs["input_ids"].flatten()
    shuffled = ids[torch.randperm(len(ids))].view(-1, length)
    ids = shuffled[:, torch.arange(length) % period]
    labels = ids.clone()
    labels[:, : period + 1] = IGNORED
    return {"input_ids": ids, "labels": labels}


def loss(
    ssm: Any, inputs: dict[str, torch.Tensor], draft_vocab: torch.Tensor
) -> torch.Tensor:
    """Cross-entropy of the wanted tokens that the reduced head has."""
    device = inputs["labels"].device
    fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    with torch.autocast(device.type, torch.bfloat16, enabled=fast):
        logits, wanted = wanted_logits(ssm, inputs, draft_vocab)
    logits = logits.float()
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
    if isinstance(model, NewSSM):
        hidden = model.hidden(inputs["input_ids"])
        rows = model.rows(draft_vocab)
    else:
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
