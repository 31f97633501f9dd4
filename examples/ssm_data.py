"""Training data of a small speculative model (SSM): its target's own greedy text.

    python examples/ssm_data.py generate --out data/smollm2
    python examples/ssm_data.py label --out data/smollm2
    python examples/ssm_data.py prompts --out prompts.jsonl

`generate` continues real prompts (ShareGPT turns as chats, headers of Python functions
as plain text) greedily with the target; `label` adds the target's most probable tokens
at every position. Both append to what is there, so both can be stopped and started
again. `prompts` writes no more than the prompts, for `vllm-specinfer tune`. Prompts
that share text with MT-bench or HumanEval are left out: both stay unseen.
"""

import argparse
import ast
import itertools
import json
import os
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from vllm_specinfer import assets

MAX_PROMPT = 256
SAMPLES = "samples.jsonl"
NGRAM = 8
TOP = 16
# One position of labels.bin: the target's TOP tokens and their probabilities.
LABEL = np.dtype([("token", "<u2", TOP), ("probability", "<f2", TOP)])


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


def prompts(target: Path, seed: int) -> Iterator[tuple[str, list[int]]]:
    """Training prompts as (kind, token ids), four chats to one function header."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    held_out: set[tuple[str, ...]] = set()
    for text in assets.mtbench() + assets.humaneval():
        held_out |= word_ngrams(text)

    def usable(text: str) -> bool:
        return bool(text.strip()) and not (word_ngrams(text) & held_out)

    rng = random.Random(seed)
    chats = [t for t in dict.fromkeys(assets.sharegpt()) if len(t) < 1200]
    code = list(dict.fromkeys(code_headers()))
    rng.shuffle(chats)
    rng.shuffle(code)
    codes = filter(usable, code)
    for i, text in enumerate(filter(usable, chats)):
        chat = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= MAX_PROMPT:
            yield "chat", ids
        if i % 4 == 3 and (header := next(codes, None)) is not None:
            ids = tokenizer.encode(header)
            if len(ids) <= MAX_PROMPT:
                yield "code", ids


def write_prompts(args: argparse.Namespace) -> None:
    """Write args.prompts prompts to the file args.out."""
    source = prompts(args.target or assets.smollm2(), args.seed)
    with args.out.open("w") as file:
        for _, ids in itertools.islice(source, args.prompts):
            file.write(json.dumps({"prompt": ids}) + "\n")


def read_samples(folder: Path) -> list[dict]:
    """The samples so far: kind, prompt and answer, the last two as token ids."""
    return [json.loads(line) for line in whole_lines(folder).splitlines()]


def whole_lines(folder: Path) -> bytes:
    """Of samples.jsonl; its last line may have been cut off, or be in the making."""
    path = folder / SAMPLES
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def generate(args: argparse.Namespace) -> None:
    """Append the target's greedy continuations to args.out/samples.jsonl."""
    from vllm import LLM, SamplingParams

    target = args.target or assets.smollm2()
    args.out.mkdir(parents=True, exist_ok=True)
    done = len(read_samples(args.out))
    if (args.out / SAMPLES).exists():
        os.truncate(args.out / SAMPLES, len(whole_lines(args.out)))
    llm = LLM(
        str(target),
        dtype="bfloat16",
        max_model_len=MAX_PROMPT + args.max_tokens,
        max_num_seqs=args.batch,
        enable_prefix_caching=False,
    )
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    source = itertools.islice(prompts(target, args.seed), done, args.prompts)
    started, num_tokens = time.time(), 0
    while batch := list(itertools.islice(source, 4 * args.batch)):
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for _, ids in batch], params, use_tqdm=False
        )
        with (args.out / SAMPLES).open("a") as file:
            for (kind, ids), output in zip(batch, outputs, strict=True):
                answer = list(output.outputs[0].token_ids)
                num_tokens += len(answer)
                row = {"kind": kind, "prompt": ids, "answer": answer}
                file.write(json.dumps(row) + "\n")
        done += len(batch)
        rate = num_tokens / (time.time() - started)
        print(f"{done} prompts, {num_tokens} new tokens, {rate:.0f}/s", flush=True)


def label(args: argparse.Namespace) -> None:
    """Append LABEL records of every sample's positions to args.out/labels.bin."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(
        args.target or assets.smollm2(), dtype=torch.bfloat16
    ).eval()
    texts = [row["prompt"] + row["answer"] for row in read_samples(args.out)]
    path = args.out / "labels.bin"
    done = path.stat().st_size // LABEL.itemsize if path.exists() else 0
    ends = np.cumsum([len(text) for text in texts])
    first = int(np.searchsorted(ends, done, side="right"))
    # A killed run may have left part of a sample behind.
    with path.open("ab") as file:
        file.truncate((int(ends[first - 1]) if first else 0) * LABEL.itemsize)
    for start in range(first, len(texts), args.batch):
        group = texts[start : start + args.batch]
        order = sorted(range(len(group)), key=lambda i: len(group[i]))
        records: list[np.ndarray] = [np.empty(0, LABEL)] * len(group)
        for part in range(0, len(order), 16):
            mine = order[part : part + 16]
            ids = torch.zeros(len(mine), len(group[mine[-1]]), dtype=torch.long)
            for row, i in enumerate(mine):
                ids[row, : len(group[i])] = torch.tensor(group[i])
            with torch.inference_mode():
                hidden = target.model(ids).last_hidden_state
                for row, i in enumerate(mine):
                    logits = target.lm_head(hidden[row, : len(group[i])]).float()
                    values, tokens = logits.topk(TOP)
                    values -= logits.logsumexp(-1, keepdim=True)
                    records[i] = np.empty(len(group[i]), LABEL)
                    records[i]["token"] = tokens
                    records[i]["probability"] = values.exp()
        with path.open("ab") as file:
            for record in records:
                record.tofile(file)
        print(f"{start + len(group)} of {len(texts)} samples", flush=True)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    for name in ("generate", "prompts"):
        stage = stages.add_parser(name)
        stage.add_argument("--prompts", type=int, default=100_000)
        stage.add_argument("--seed", type=int, default=0)
    stage = stages.choices["generate"]
    stage.add_argument("--max-tokens", type=int, default=160)
    stage.add_argument("--batch", type=int, default=128)
    stage = stages.add_parser("label")
    stage.add_argument("--batch", type=int, default=128, help="samples between writes")
    stage.add_argument("--threads", type=int, default=1)
    for stage in stages.choices.values():
        stage.add_argument("--out", type=Path, required=True)
        stage.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    args = parser.parse_args()
    stages_by_name = {"generate": generate, "label": label, "prompts": write_prompts}
    stages_by_name[args.stage](args)


if __name__ == "__main__":
    main()
