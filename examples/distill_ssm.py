"""Distil a small speculative model (SSM) from its target's own greedy text.

    python examples/distill_ssm.py generate --out data/smollm2
    python examples/distill_ssm.py train --data data/smollm2 --out runs/ssm0
    python examples/distill_ssm.py evaluate --data data/smollm2 --ssm runs/ssm0

`generate` continues real prompts (ShareGPT turns as chats, headers of Python functions
as plain text) greedily with the target and appends to disk as it goes; `train` fits a
small LlamaForCausalLM whose tied embedding starts as the principal components of the
target's; `evaluate` reports hit rates and simulated tokens per step. Prompts that share
text with MT-bench or HumanEval are left out, so both stay unseen.
"""

import argparse
import ast
import collections
import itertools
import json
import math
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from copy_heads import write_copy_heads

from vllm_specinfer import assets

MAX_PROMPT = 256
VALIDATION_PROMPTS = 64
NGRAM = 8
FREQUENT_TOKENS = 8192
SAMPLED_TOKENS = 2048


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


def generate(args: argparse.Namespace) -> None:
    """Append the target's greedy continuations to args.out/samples.jsonl."""
    from vllm import LLM, SamplingParams

    target = args.target or assets.smollm2()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "samples.jsonl"
    done = sum(1 for _ in path.open()) if path.exists() else 0
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
        with path.open("a") as file:
            for (kind, ids), output in zip(batch, outputs, strict=True):
                answer = list(output.outputs[0].token_ids)
                num_tokens += len(answer)
                row = {"kind": kind, "prompt": ids, "answer": answer}
                file.write(json.dumps(row) + "\n")
        done += len(batch)
        rate = num_tokens / (time.time() - started)
        print(f"{done} prompts, {num_tokens} new tokens, {rate:.0f}/s", flush=True)


def load(path: Path) -> tuple[list[dict], list[dict]]:
    """(training, validation) samples; validation is the head of the file."""
    rows = [json.loads(line) for line in path.open()]
    return rows[VALIDATION_PROMPTS:], rows[:VALIDATION_PROMPTS]


def new_ssm(target_path: Path, args: argparse.Namespace, common):
    """A small Llama: the target's embedding on its main directions, copying heads."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    target = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    theirs = target.config
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters=theirs.rope_parameters,
        rms_norm_eps=theirs.rms_norm_eps,
        tie_word_embeddings=True,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    ssm = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding = target.model.embed_tokens.weight
        _, _, directions = torch.linalg.svd(
            embedding - embedding.mean(0), full_matrices=False
        )
        projected = embedding @ directions[: args.hidden].T
        ssm.model.embed_tokens.weight.copy_(projected / projected.std() * 0.5)
        ssm.model.norm.weight.fill_(0.05)
        write_copy_heads(ssm, common)
    return ssm


def batches(rows: list[dict], tokens: int, rng: random.Random) -> Iterator[list[dict]]:
    """Batches of about `tokens` tokens with similar lengths, in random order."""
    order = sorted(rows, key=lambda r: len(r["prompt"]) + len(r["answer"]))
    groups: list[list[dict]] = [[]]
    for row in order:
        length = len(row["prompt"]) + len(row["answer"])
        if groups[-1] and length * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(row)
    rng.shuffle(groups)
    yield from groups


def collate(rows: list[dict]):
    """Token ids [B, T] and the mask of positions whose next token is an answer's."""
    import torch

    length = max(len(r["prompt"]) + len(r["answer"]) for r in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        text = row["prompt"] + row["answer"]
        ids[i, : len(text)] = torch.tensor(text)
        mask[i, len(row["prompt"]) - 1 : len(text) - 1] = True
    return ids, mask


def frequent_tokens(rows: list[dict], count: int):
    """The `count` commonest tokens of the answers."""
    import torch

    counts = collections.Counter(t for row in rows for t in row["answer"])
    return torch.tensor([t for t, _ in counts.most_common(count)])


def sampled_loss(hidden, head, wanted, frequent):
    """Cross-entropy over the frequent, the wanted and a sample of all other tokens.

    The sample stands for all tokens left out, so its logits get the log of how many
    each one stands for. Most of a small SSM's time goes into its head otherwise.
    """
    import torch

    kept = torch.zeros(head.shape[0], dtype=torch.bool)
    kept[frequent] = True
    kept[wanted] = True
    others = torch.nonzero(~kept)[:, 0]
    sample = others[torch.randperm(len(others))[:SAMPLED_TOKENS]]
    columns = torch.cat([torch.nonzero(kept)[:, 0], sample])
    place = torch.empty(head.shape[0], dtype=torch.long)
    place[columns] = torch.arange(len(columns))
    logits = hidden.bfloat16() @ head[columns].bfloat16().T
    weight = torch.zeros(len(columns))
    weight[-len(sample) :] = math.log(len(others) / len(sample))
    return torch.nn.functional.cross_entropy(logits + weight, place[wanted])


def train(args: argparse.Namespace) -> None:
    """Fit the SSM with cross-entropy on the target's greedy tokens."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    target_path = args.target or assets.smollm2()
    if args.resume:
        ssm = LlamaForCausalLM.from_pretrained(args.resume, dtype=torch.float32)
    else:
        rows, _ = load(args.data / "samples.jsonl")
        ssm = new_ssm(target_path, args, frequent_tokens(rows, FREQUENT_TOKENS))
    rng = random.Random(args.seed)
    embedding = ssm.model.embed_tokens.weight
    layers = [p for p in ssm.parameters() if p is not embedding]
    rates = (args.lr, args.lr / 2)
    optimizer = torch.optim.AdamW(
        [{"params": layers}, {"params": [embedding]}],
        betas=(0.9, 0.95),
        weight_decay=0.01,
        fused=True,
    )
    print(f"{sum(p.numel() for p in ssm.parameters()) / 1e6:.1f} M parameters")
    started, step, losses = time.time(), 0, []
    budget, epoch, saved = args.minutes * 60, 0, time.time()
    while time.time() - started < budget:
        # The file may still be growing: every epoch reads what is there.
        rows, _ = load(args.data / "samples.jsonl")
        frequent = frequent_tokens(rows, FREQUENT_TOKENS)
        for group in batches(rows, args.batch_tokens, rng):
            spent = (time.time() - started) / budget
            if spent >= 1:
                break
            warm = min(1.0, (step + 1) / 100)
            decay = warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * spent)))
            for rate, param_group in zip(rates, optimizer.param_groups, strict=True):
                param_group["lr"] = rate * decay
            ids, mask = collate(group)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = ssm.model(ids).last_hidden_state[:, :-1][mask[:, :-1]]
            wanted = ids[:, 1:][mask[:, :-1]]
            loss = sampled_loss(hidden, ssm.lm_head.weight, wanted, frequent)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(ssm.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step % 100 == 0:
                mean = sum(losses[-100:]) / len(losses[-100:])
                print(
                    f"epoch {epoch} step {step} {100 * spent:.0f}% rows {len(rows)} "
                    f"loss {mean:.3f}",
                    flush=True,
                )
            if time.time() - saved > args.save_minutes * 60:
                save(ssm, AutoTokenizer.from_pretrained(target_path), args.out)
                saved = time.time()
        epoch += 1
    save(ssm, AutoTokenizer.from_pretrained(target_path), args.out)


def save(ssm, tokenizer, out: Path) -> None:
    """Write a bfloat16 copy of the SSM with the target's tokenizer."""
    import copy

    import torch

    copy.deepcopy(ssm).to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def simulate(ssm, ids, first: int, num_nodes: int, max_depth: int, width: int) -> float:
    """Mean tokens per step of greedy best-first trees along one known continuation."""
    import torch

    answer = ids[first:]
    at, steps = 0, 0
    while at < len(answer):
        tree: list[tuple[float, tuple[int, ...]]] = []
        frontier = [(0.0, ())]
        for _ in range(max_depth):
            rows = torch.tensor([ids[: first + at] + list(p) for _, p in frontier])
            hidden = ssm.model(rows).last_hidden_state[:, -1]
            logprobs = ssm.lm_head(hidden).float().log_softmax(-1)
            values, tokens = logprobs.topk(width)
            grown = [
                (score + value, (*path, token))
                for (score, path), vs, ts in zip(
                    frontier, values.tolist(), tokens.tolist(), strict=True
                )
                for value, token in zip(vs, ts, strict=True)
            ]
            tree = sorted(tree + grown, reverse=True)[:num_nodes]
            frontier = sorted(set(grown) & set(tree), reverse=True)[:width]
            if not frontier:
                break
        paths = {path for _, path in tree}
        accepted = 0
        while tuple(answer[at : at + accepted + 1]) in paths and at + accepted < len(
            answer
        ):
            accepted += 1
        at += accepted + 1
        steps += 1
    return len(answer) / steps


def evaluate(args: argparse.Namespace) -> None:
    """Print hit rates by rank and simulated tokens per step on held-out prompts."""
    import torch
    from transformers import LlamaForCausalLM

    torch.set_num_threads(args.threads)
    ssm = LlamaForCausalLM.from_pretrained(args.ssm, dtype=torch.float32).eval()
    _, rows = load(args.data / "samples.jsonl")
    for kind in ("chat", "code"):
        mine = [r for r in rows if r["kind"] == kind]
        hits, total, rates = torch.zeros(5), 0, []
        with torch.inference_mode():
            for row in mine:
                ids, mask = collate([row])
                logits = ssm(ids).logits[0, :-1][mask[0, :-1]]
                wanted = ids[0, 1:][mask[0, :-1]]
                top = logits.topk(5).indices == wanted[:, None]
                hits += top.cumsum(-1).bool().float().sum(0)
                total += len(wanted)
            for row in mine[: args.simulate]:
                rates.append(
                    simulate(
                        ssm, row["prompt"] + row["answer"], len(row["prompt"]), 8, 4, 4
                    )
                )
        rate = sum(rates) / max(len(rates), 1)
        top_k = " ".join(f"top-{k + 1} {hits[k] / total:.3f}" for k in (0, 1, 2, 4))
        print(f"{kind}: {len(mine)} prompts, {top_k}, 8 nodes {rate:.2f} tokens/step")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("generate")
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--prompts", type=int, default=100_000)
    stage.add_argument("--max-tokens", type=int, default=160)
    stage.add_argument("--batch", type=int, default=128)
    stage = stages.add_parser("train")
    stage.add_argument("--data", type=Path, required=True)
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--resume", type=Path, help="continue from this SSM")
    stage.add_argument("--hidden", type=int, default=256)
    stage.add_argument("--intermediate", type=int, default=512)
    stage.add_argument("--lr", type=float, default=2e-3)
    stage.add_argument("--batch-tokens", type=int, default=1536)
    stage.add_argument("--minutes", type=float, default=60)
    stage.add_argument("--save-minutes", type=float, default=5)
    stage.add_argument("--threads", type=int, default=1)
    stage = stages.add_parser("evaluate")
    stage.add_argument("--data", type=Path, required=True)
    stage.add_argument("--ssm", type=Path, required=True)
    stage.add_argument("--simulate", type=int, default=12, help="prompts to simulate")
    stage.add_argument("--threads", type=int, default=1)
    for stage in stages.choices.values():
        stage.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
        stage.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    {"generate": generate, "train": train, "evaluate": evaluate}[args.stage](args)


if __name__ == "__main__":
    main()
