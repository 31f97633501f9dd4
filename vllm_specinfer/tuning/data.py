"""The target's own greedy continuations of prompts, and what else it thought likely.

Dimension legend: T tokens of an answer, TOP likeliest tokens; samples are ragged.
"""

import collections
import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import AutoConfig

from vllm_specinfer.evidence.engines import cpu_kv_cache, warn_of_waits
from vllm_specinfer.model_refusals import inner_states_reason, model_reason
from vllm_specinfer.tuning.precision import fast_dtype, training_device
from vllm_specinfer.tuning.prompts import MAX_PROMPT_TOKENS, read_prompts
from vllm_specinfer.tuning.settings import Training, open_folder

if TYPE_CHECKING:
    from vllm.config import ModelConfig

SAMPLES_FILE, LABELS_FILE = "samples.jsonl", "labels.bin"
# Of each token of an answer: the target's likeliest ones.
TOP = 8
LABEL = np.dtype([("token", "<i4", TOP), ("probability", "<f2", TOP)])
PROMPTS_BETWEEN_WRITES = 256


@dataclass(frozen=True)
class Sample:
    """One prompt and what the target makes of it.

    Attributes:
        prompt: Token ids.
        answer: Token ids.
        label: [T] LABEL, what else it might have been; None where nobody has asked.
    """

    prompt: list[int]
    answer: list[int]
    label: np.ndarray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class TrainingData:
    """The target's continuations.

    Attributes:
        training: To learn from.
        validation: Held out; the first prompts of the file.
        draft_vocab: The commonest tokens of the training answers, ascending.
    """

    training: list[Sample]
    validation: list[Sample]
    draft_vocab: list[int]


def prepare(out: Path, settings: Training, tokenizer: Any) -> TrainingData:
    """Begin a folder or go on with one, up to the target's continuations.

    Args:
        out: The folder.
        settings: Of what is trained.
        tokenizer: The target's.

    Raises:
        ValueError: The input cannot be used, or the folder holds something else.
        OSError: A file is missing or the disk is full.
    """
    target = check_target(settings)
    vocab_size = min(len(tokenizer), target.get_vocab_size())
    room = target.max_model_len - settings.max_tokens
    if room < 1:
        raise ValueError(
            f"max_tokens must be below the {target.max_model_len} positions of the "
            f"target; got {settings.max_tokens}"
        )
    room = min(room, MAX_PROMPT_TOKENS)
    prompts = read_prompts(Path(settings.prompts), tokenizer, room, vocab_size)
    prompts = prompts[: settings.max_prompts or None]
    if len(prompts) < 2:
        raise ValueError(
            f"{settings.prompts} must hold at least two prompts, one of them for "
            f"validation; got {len(prompts)}"
        )
    open_folder(out, settings, tokenizer.get_vocab())
    samples = [s for s in generate(out, settings, prompts) if s.answer]
    if len(samples) < 2:
        raise ValueError(
            f"the target must continue at least two prompts of {settings.prompts}, one "
            f"of them for validation; got {len(samples)} continuations"
        )
    whole = sum(len(s.answer) == settings.max_tokens for s in samples)
    if whole > len(samples) / 2:
        print(
            f"{whole} of {len(samples)} continuations have all {settings.max_tokens} "
            "tokens that --max-tokens allows",
            flush=True,
        )
    held_out = max(1, round(len(samples) * settings.validation))
    if held_out == len(samples):
        raise ValueError(
            f"validation must leave something of the {len(samples)} continuations to "
            f"learn from; got {settings.validation}"
        )
    validation, training = samples[:held_out], samples[held_out:]
    counts = collections.Counter(t for s in training for t in s.answer)
    commonest = [t for t, _ in counts.most_common(settings.draft_vocab)]
    vocab = sorted(commonest) if settings.draft_vocab else list(range(vocab_size))
    return TrainingData(training, validation, vocab)


def check_target(settings: Training) -> "ModelConfig":
    """The target's config in vLLM.

    Raises:
        ValueError: Specinfer would refuse what is to be trained for it, or training
            would read another target than the engine.
    """
    from vllm import EngineArgs

    if (revision := settings.engine.get("revision")) is not None:
        raise ValueError(
            "the target of another revision must be a folder, for training reads it, "
            f"too; got the revision {revision!r} of the engine"
        )
    arguments = EngineArgs(settings.target, **settings.engine)
    target = arguments.create_model_config()
    reason = model_reason(target, "the target")
    if reason is None and settings.reads_layers:
        reason = inner_states_reason(target)
    if reason is not None:
        raise ValueError(reason)
    return target


def read_samples(out: Path) -> list[Sample]:
    """The samples so far; a line that a kill cut off does not count."""
    file = out / SAMPLES_FILE
    samples = []
    if file.is_file():
        whole, _, rest = file.read_bytes().rpartition(b"\n")
        try:
            samples = [Sample(**json.loads(line)) for line in whole.splitlines()]
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{file} must be as it was written; got {error}"
            ) from error
        if rest:
            os.truncate(file, len(whole) + 1 if whole else 0)
    return samples


def with_labels(out: Path, samples: list[Sample]) -> list[Sample]:
    """The samples with their labels; those of a sample that a kill cut off are dropped.

    Raises:
        ValueError: There are fewer labels than tokens.
    """
    file = out / LABELS_FILE
    ends = np.cumsum([0, *(len(s.answer) for s in samples)])
    size = file.stat().st_size // LABEL.itemsize if file.is_file() else 0
    if size < ends[-1]:
        raise ValueError(
            f"{file} must be as it was written; got labels of {size} tokens of "
            f"{ends[-1]}"
        )
    if not ends[-1]:
        file.unlink(missing_ok=True)
        return samples
    os.truncate(file, ends[-1] * LABEL.itemsize)
    labels = np.memmap(file, LABEL, "r")
    spans = zip(samples, ends, ends[1:], strict=False)
    return [replace(s, label=labels[first:last]) for s, first, last in spans]


def _label(logprobs: Any) -> np.ndarray:
    """[T] LABEL of vLLM's FlatLogprobs, where each token comes before its likeliest."""
    label = np.empty(len(logprobs), LABEL)
    tokens, chances = (
        np.reshape(values, (-1, 1 + TOP))[:, 1:]
        for values in (logprobs.token_ids, logprobs.logprobs)
    )
    label["token"], label["probability"] = tokens, np.exp(chances)
    return label


def _engine_dtype(target: str) -> str:
    """For vLLM: float32 where the checkpoint's own dtype may be slow."""
    if fast_dtype(training_device()) != torch.float32:
        return "auto"
    quantized = hasattr(AutoConfig.from_pretrained(target), "quantization_config")
    return "auto" if quantized else "float32"


def generate(out: Path, settings: Training, prompts: list[list[int]]) -> list[Sample]:
    """The target's greedy continuations, appended to the samples of an earlier run.

    These may have the same prompts in other tokens: a chat template may know the date.
    """
    samples = read_samples(out)
    if settings.labels:
        samples = with_labels(out, samples)
    left = prompts[len(samples) :]
    if not left:
        return samples
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts)) + settings.max_tokens
    arguments = {
        "dtype": _engine_dtype(settings.target),
        "max_model_len": longest,
        "max_num_seqs": min(64, len(left)),
        "seed": settings.seed,
        **cpu_kv_cache(),
    }
    llm = LLM(settings.target, **{**arguments, **settings.engine})
    warn_of_waits(llm, arguments["max_num_seqs"])
    params = SamplingParams(
        temperature=0,
        max_tokens=settings.max_tokens,
        logprobs=TOP if settings.labels else None,
        flat_logprobs=True,
        detokenize=False,
    )
    for start in range(0, len(left), PROMPTS_BETWEEN_WRITES):
        batch = left[start : start + PROMPTS_BETWEEN_WRITES]
        print(f"continuations {len(samples)} of {len(prompts)}", flush=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        new = [
            Sample(
                ids,
                list(answer.token_ids),
                _label(answer.logprobs) if settings.labels else None,
            )
            for ids, answer in zip(batch, (o.outputs[0] for o in outputs), strict=True)
        ]
        if settings.labels:
            with (out / LABELS_FILE).open("ab") as file:
                file.writelines(s.label.tobytes() for s in new)
        with (out / SAMPLES_FILE).open("a") as file:
            file.writelines(
                json.dumps({"prompt": s.prompt, "answer": s.answer}) + "\n" for s in new
            )
        samples += new
    # Training needs the memory.
    llm.llm_engine.engine_core.shutdown()
    return samples
