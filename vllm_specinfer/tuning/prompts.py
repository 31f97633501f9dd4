"""Prompts to train on, from a file."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_PROMPT_TOKENS = 1024


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
