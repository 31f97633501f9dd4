"""The SSM of one round: loaded or made new, trained on windows, asked what it hits.

Dimension legend: B continuations, T tokens of the longest, H hidden size, V' rows of
the reduced head.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from vllm_specinfer.draft_vocab import draft_vocab_of
from vllm_specinfer.tuning.data import TOP, Sample
from vllm_specinfer.tuning.new_ssm import NewSSM, fast_attention
from vllm_specinfer.tuning.precision import mixed_precision
from vllm_specinfer.tuning.settings import PoolSettings

IGNORED = -100
# Token ids of prompt and answer, the same with IGNORED where nothing is to be learned,
# and the target's likeliest tokens of the answer, if they are known.
Row = tuple[list[int], list[int], np.ndarray | None]
# Part of a new SSM's batches that keep what it copies by.
REPEATED = 0.15


def first_weights(settings: PoolSettings) -> torch.nn.Module:
    """The base SSM, or a new one that shares the target's embedding."""
    torch.manual_seed(settings.seed)
    if settings.base is None:
        target = AutoModelForCausalLM.from_pretrained(
            settings.target, dtype=torch.bfloat16
        )
        embedding = target.get_input_embeddings().weight.detach().float()
        return NewSSM(embedding, settings.target, settings.hidden, settings.layers)
    return AutoModelForCausalLM.from_pretrained(
        settings.base, dtype=torch.float32, attn_implementation=fast_attention()
    )


def base_as_it_is(base: str) -> tuple[torch.nn.Module, list[int] | None]:
    """A base SSM in its own dtype, and what it drafts; None for all tokens."""
    ssm = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return ssm, draft_vocab_of(base, None, ssm.config.vocab_size)


@torch.inference_mode()
def check_logits(base: str) -> None:
    """Raises ValueError where a base's are more than a product (`wanted_logits`)."""
    ssm, ids = base_as_it_is(base)[0], torch.arange(8)[None]
    hidden = ssm.base_model(input_ids=ids).last_hidden_state
    product = hidden @ ssm.get_output_embeddings().weight.T
    if not torch.allclose(ssm(input_ids=ids).logits, product, rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"base must have a head without scale, cap and bias; got {base!r}"
        )


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
        self._rows: list[Row] = []
        for sample, marked in zip(samples, marks, strict=True):
            if marked.all():
                continue
            known = np.repeat(marked, length)[: len(sample.answer)]
            labels = np.where(known, IGNORED, sample.answer)
            labels = [IGNORED] * len(sample.prompt) + labels.tolist()
            self._rows.append((sample.prompt + sample.answer, labels, sample.label))
        self.lengths = [len(ids) for ids, *_ in self._rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Row:
        return self._rows[i]


def collate(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """Padded input_ids and labels, [B, T] each; padding is at the end.

    With likeliest tokens of the target, top_tokens and top_chances, [B, T, TOP] each;
    chances are 0 in prompts.
    """
    ids, labels, tops = zip(*rows, strict=True)
    inputs = {
        "input_ids": pad_sequence(list(map(torch.tensor, ids)), batch_first=True),
        "labels": pad_sequence(
            list(map(torch.tensor, labels)), batch_first=True, padding_value=IGNORED
        ),
    }
    if all(top is not None for top in tops):
        shape = (*inputs["labels"].shape, TOP)
        tokens, chances = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for i, top in enumerate(tops):
            answer = slice(len(ids[i]) - len(top), len(ids[i]))
            tokens[i, answer] = torch.from_numpy(top["token"].astype(np.int64))
            chances[i, answer] = torch.from_numpy(top["probability"].astype(np.float32))
        inputs |= {"top_tokens": tokens, "top_chances": chances}
    return inputs


def collate_for_new(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
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
    """Cross-entropy of the wanted tokens that the reduced head has.

    Where the target's likeliest tokens are given, half of it is to them. They keep the
    SSM from believing that nothing else could have been; greedy trees need the first
    one most.
    """
    with mixed_precision(inputs["labels"].device):
        logits, wanted, known = wanted_logits(ssm, inputs, draft_vocab)
    logprobs = logits.float().log_softmax(-1)
    gained = logprobs.gather(1, wanted[:, None])[:, 0]
    if "top_tokens" in inputs:
        top, has_row = _rows_of(inputs["top_tokens"][:, 1:][known], draft_vocab)
        chances = inputs["top_chances"][:, 1:][known] * has_row
        chances = chances / chances.sum(1, keepdim=True).clamp(min=1e-6)
        gained = (gained + (chances * logprobs.gather(1, top)).sum(1)) / 2
    return -gained.sum() / max(len(gained), 1)


def _rows_of(
    tokens: torch.Tensor, draft_vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the reduced head that tokens have, and whether they have one."""
    draft_vocab = draft_vocab.to(tokens.device)
    rows = torch.searchsorted(draft_vocab, tokens.contiguous())
    rows = rows.clamp(max=len(draft_vocab) - 1)
    return rows, draft_vocab[rows] == tokens


def wanted_logits(
    model: Any, inputs: dict[str, torch.Tensor], draft_vocab: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where a token is wanted that the reduced head has.

    Args:
        model: The SSM.
        inputs: As `collate` gives them.
        draft_vocab: [V'] tokens, ascending.

    Returns:
        Logits [n, V'], the rows of the wanted tokens [n], and where they are,
        [B, T - 1] bool.
    """
    labels = inputs["labels"][:, 1:]
    draft_vocab = draft_vocab.to(labels.device)
    place, known = _rows_of(labels, draft_vocab)
    if isinstance(model, NewSSM):
        hidden = model.hidden(inputs["input_ids"])
        rows = model.rows(draft_vocab)
    else:
        hidden = model.base_model(input_ids=inputs["input_ids"]).last_hidden_state
        rows = model.get_output_embeddings().weight[draft_vocab]
    return hidden[:, :-1][known] @ rows.T, place[known], known


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
            (s.prompt + s.answer, [IGNORED] * len(s.prompt) + s.answer, None)
            for s in batch
        ]
        inputs = {name: value.to(device) for name, value in collate(rows).items()}
        labels = inputs["labels"][:, 1:]
        right = torch.zeros(labels.shape, dtype=torch.bool)
        with mixed_precision(device):
            logits, wanted, known = wanted_logits(ssm, inputs, draft_vocab)
        right[known.cpu()] = (logits.argmax(-1) == wanted).cpu()
        for i, sample in enumerate(batch):
            first = len(sample.prompt) - 1
            found.append(right[i, first : first + len(sample.answer)].numpy())
    return found


def windows_hit(hit: np.ndarray, length: int) -> np.ndarray:
    """[windows] bool: every token of the window is hit; the last one may be short."""
    padded = np.pad(hit, (0, -len(hit) % length), constant_values=True)
    return padded.reshape(-1, length).all(axis=1)
