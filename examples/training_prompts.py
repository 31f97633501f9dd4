"""Prompts to train a small speculative model (SSM) on, for `vllm-specinfer tune`.

    python examples/training_prompts.py --prompts 4096 --out prompts.jsonl

ShareGPT turns as chats, or as plain text where the target has no chat template, headers
of Python functions as plain text, all of at most 256 tokens. Prompts that share text
with MT-bench or HumanEval are left out: both stay unseen.
"""

import argparse
import ast
import itertools
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vllm_specinfer import assets

MAX_PROMPT = 256
NGRAM = 8


def word_ngrams(text: str) -> set[tuple[str, ...]]:
    """All runs of NGRAM words; the whole text where it is shorter."""
    words = text.lower().split()
    last = max(len(words) - NGRAM, 0)
    return {tuple(words[i : i + NGRAM]) for i in range(last + 1)}


def code_headers() -> Iterator[str]:
    """Signatures with docstrings of Python's standard library."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                yield "".join(lines[node.lineno - 1 : node.body[0].end_lineno])


def prompts(target: Path, seed: int) -> Iterator[list[int]]:
    """Token ids of training prompts, four chats to one function header."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    held_out: set[tuple[str, ...]] = set()
    for text in assets.mtbench() + assets.humaneval():
        held_out |= word_ngrams(text)

    def usable(text: str) -> bool:
        return bool(text.strip()) and not (word_ngrams(text) & held_out)

    rng = random.Random(seed)
    has_template = getattr(tokenizer, "chat_template", "") is not None
    chats = [t for t in dict.fromkeys(assets.sharegpt()) if len(t) < 1200]
    code = list(dict.fromkeys(code_headers()))
    rng.shuffle(chats)
    rng.shuffle(code)
    codes = filter(usable, code)
    for i, text in enumerate(filter(usable, chats)):
        chat = [{"role": "user", "content": text}]
        ids = (
            tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            if has_template
            else tokenizer.encode(text)
        )
        if len(ids) <= MAX_PROMPT:
            yield ids
        if i % 4 == 3 and (header := next(codes, None)) is not None:
            ids = tokenizer.encode(header)
            if len(ids) <= MAX_PROMPT:
                yield ids


def main() -> None:
    """Write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, required=True, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    args = parser.parse_args()
    source = prompts(args.target or assets.smollm2(), args.seed)
    with args.out.open("w") as file:
        for ids in itertools.islice(source, args.prompts):
            file.write(json.dumps({"prompt": ids}) + "\n")


if __name__ == "__main__":
    main()
