"""Prompts, and the target's own greedy continuations of them.

Dimension legend: none; samples are ragged lists.
"""

import collections
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_specinfer.tuning.settings import Training, open_folder

SAMPLES_FILE = "samples.jsonl"
MAX_PROMPT_TOKENS = 1024
PROMPTS_BETWEEN_WRITES = 256


@dataclass(frozen=True)
class Sample:
    """One prompt and what the target makes of it, as token ids."""

    prompt: list[int]
    answer: list[int]


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


def prepare(
    out: Path, settings: Training, command: Sequence[str], tokenizer: Any
) -> TrainingData:
    """Begin a folder or go on with one, up to the target's continuations.

    Raises:
        ValueError: The input cannot be used, or the folder holds something else.
        OSError: A file is missing or the disk is full.
    """
    prompts = read_prompts(Path(settings.prompts), tokenizer)
    prompts = prompts[: settings.max_prompts or None]
    if len(prompts) < 2:
        raise ValueError(
            f"{settings.prompts} must hold at least two prompts, one of them for "
            f"validation; got {len(prompts)}"
        )
    open_folder(out, settings, command)
    samples = [s for s in generate(out, settings, prompts) if s.answer]
    if len(samples) < 2:
        raise ValueError(
            f"the target must continue at least two prompts of {settings.prompts}, one "
            f"of them for validation; got {len(samples)} continuations"
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
    vocab = sorted(commonest) if settings.draft_vocab else list(range(len(tokenizer)))
    return TrainingData(training, validation, vocab)


def read_prompts(
    file: Path, tokenizer: Any, max_tokens: int = MAX_PROMPT_TOKENS
) -> list[list[int]]:
    """Prompts as token ids, in the order of the file, each once.

    A `.jsonl` line is `{"prompt": text}`, `{"prompt": [ids]}` or
    `{"messages": [...]}` (a chat, put through the chat template); any other file has
    one prompt per line. Prompts are cut to their last `max_tokens` tokens; 0 for all.

    Raises:
        ValueError: A line is none of these, or there is no prompt at all.
    """
    found: dict[tuple[int, ...], None] = {}
    for number, line in enumerate(_lines(file), start=1):
        ids = (
            _parse_line(line, tokenizer, f"{file}, line {number}")
            if file.suffix == ".jsonl"
            else _encoded(tokenizer.encode, line, f"{file}, line {number}")
        )
        if ids:
            found[tuple(ids[-max_tokens:])] = None
    if not found:
        raise ValueError(f"{file} must hold at least one prompt; got none")
    return [list(ids) for ids in found]


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                if line.strip():
                    yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text; got {error}") from error


def _parse_line(line: str, tokenizer: Any, where: str) -> list[int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON; got {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(prompt, str):
        return _encoded(tokenizer.encode, prompt, where)
    if isinstance(prompt, list) and all(
        type(t) is int and 0 <= t < len(tokenizer) for t in prompt
    ):
        return prompt
    # Lists in place of messages would be taken for several chats.
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if is_chat and tokenizer.chat_template is not None:
        template = functools.partial(
            tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False
        )
        return _encoded(template, messages, where)
    raise ValueError(
        f"{where} must have a prompt (text, or token ids below {len(tokenizer)}) or "
        f"messages; got {line[:80]!r}"
    )


def _encoded(encode: Callable[[Any], list[int]], text: Any, where: str) -> list[int]:
    try:
        return encode(text)
    except Exception as error:  # of a tokenizer or a chat template, which may be any
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"{where} must suit the target's tokenizer; got {reason}"
        ) from error


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


def generate(out: Path, settings: Training, prompts: list[list[int]]) -> list[Sample]:
    """The target's greedy continuations, appended to the samples of an earlier run.

    Raises:
        ValueError: The earlier samples are of other prompts.
    """
    samples = read_samples(out)
    if [s.prompt for s in samples] != prompts[: len(samples)]:
        raise ValueError(
            f"{out / SAMPLES_FILE} must belong to the prompts of {settings.prompts}; "
            "got others: has the file changed?"
        )
    left = prompts[len(samples) :]
    if not left:
        return samples
    from vllm import LLM, SamplingParams

    longest = max(map(len, prompts))
    arguments = {
        "max_model_len": longest + settings.max_tokens,
        "max_num_seqs": min(64, len(left)),
        "seed": settings.seed,
    }
    llm = LLM(settings.target, **{**arguments, **settings.engine})
    params = SamplingParams(temperature=0, max_tokens=settings.max_tokens)
    for start in range(0, len(left), PROMPTS_BETWEEN_WRITES):
        batch = left[start : start + PROMPTS_BETWEEN_WRITES]
        print(f"continuations {len(samples)} of {len(prompts)}", flush=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in batch], params)
        new = [
            Sample(ids, list(output.outputs[0].token_ids))
            for ids, output in zip(batch, outputs, strict=True)
        ]
        with (out / SAMPLES_FILE).open("a") as file:
            file.writelines(json.dumps(vars(s)) + "\n" for s in new)
        samples += new
    # Training needs the memory.
    llm.llm_engine.engine_core.shutdown()
    return samples
