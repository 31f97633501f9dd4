"""Prompts to train on, from a file."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_PROMPT_TOKENS = 1024
JSON_LINES = (".jsonl", ".ndjson")


def read_prompts(
    file: Path,
    tokenizer: Any,
    max_tokens: int = MAX_PROMPT_TOKENS,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Prompts as token ids, in the order of the file, each once.

    A line of a `.jsonl` or `.ndjson` file is `{"prompt": text}`, `{"prompt": [ids]}` or
    `{"messages": [...]}` (a chat, put through the chat template); any other file has
    one prompt per line.

    Args:
        file: UTF-8.
        tokenizer: The target's.
        max_tokens: Prompts are cut to their last ones, which is said; 0 for all.
        vocab_size: Token ids are below it and `len(tokenizer)`.

    Raises:
        ValueError: A line is none of these, or there is no prompt at all.
    """
    found: dict[tuple[int, ...], None] = {}
    num_cut = 0
    end = min(len(tokenizer), vocab_size or len(tokenizer))
    for number, line in _lines(file):
        where = f"{file}, line {number}"
        if file.suffix.lower() in JSON_LINES:
            ids = _parse_line(line, tokenizer, where)
        elif file.suffix.lower() == ".json" or (not found and _is_row(line)):
            raise ValueError(
                f"{where} must be text where the file is not named .jsonl; got "
                f"{line[:80]!r}"
            )
        else:
            ids = _encoded(tokenizer.encode, line, where)
        if max(ids, default=0) >= end:
            raise ValueError(
                f"{where} must have token ids below {end}; got {line[:80]!r}"
            )
        if ids:
            num_cut += 0 < max_tokens < len(ids)
            found[tuple(ids[-max_tokens:])] = None
    if not found:
        raise ValueError(f"{file} must hold at least one prompt; got none")
    if num_cut:
        print(
            f"{num_cut} prompts of {file} are cut to their last {max_tokens} tokens",
            flush=True,
        )
    return [list(ids) for ids in found]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be UTF-8 text; got {error}") from error


def _is_row(line: str) -> bool:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and ("prompt" in row or "messages" in row)


def _parse_line(line: str, tokenizer: Any, where: str) -> list[int]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} must be JSON; got {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(prompt, str):
        return _encoded(tokenizer.encode, prompt, where)
    if isinstance(prompt, list) and all(type(t) is int and t >= 0 for t in prompt):
        return prompt
    # Lists in place of messages would be taken for several chats.
    is_chat = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if is_chat:
        template = functools.partial(
            tokenizer.apply_chat_template, add_generation_prompt=True, return_dict=False
        )
        try:
            return _encoded(template, messages, where)
        except ValueError as error:
            # Some tokenizers have a template of their own, and no such attribute.
            if getattr(tokenizer, "chat_template", "") is not None:
                raise
            raise ValueError(
                f"{where} must have a prompt where the target has no chat template; "
                "got messages"
            ) from error
    raise ValueError(
        f"{where} must have a prompt (text or token ids) or messages; got {line[:80]!r}"
    )


def _encoded(encode: Callable[[Any], list[int]], text: Any, where: str) -> list[int]:
    try:
        return encode(text)
    except Exception as error:  # of a tokenizer or a chat template, which may be any
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ValueError(
            f"{where} must suit the target's tokenizer; got {reason}"
        ) from error
