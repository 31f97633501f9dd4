"""Distil a small speculative model (SSM) from the data of ssm_data.py.

    python examples/distill_ssm.py train --data data/smollm2 --out runs/ssm0
    python examples/distill_ssm.py evaluate --data data/smollm2 --ssm runs/ssm0

The SSM is a LlamaForCausalLM whose tied embedding is the target's embedding times a
learned projection: a table of its own would have ten times the parameters of all else
and overfit. `train` lowers the cross-entropy to
the target's top tokens, and teaches copying on texts that repeat themselves;
`evaluate` reports hit rates on the held-out head of the data.
"""

import argparse
import collections
import copy
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from copy_heads import RESERVED, write_copy_heads
from ssm_data import LABEL, read_samples
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from vllm_specinfer import assets

VALIDATION_PROMPTS = 64
DRAFT_VOCAB = 8192
FREQUENT_TOKENS = 4096
SAMPLED_TOKENS = 1024
REPEATED = 0.15  # part of the batches that teach copying


class FactoredSSM(torch.nn.Module):
    """An SSM and its embedding's two factors.

    Args:
        target: Path of the target.
        args: hidden, intermediate and layers.
    """

    def __init__(self, target: Path, args: argparse.Namespace) -> None:
        super().__init__()
        teacher = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        theirs = teacher.config
        config = LlamaConfig(
            vocab_size=theirs.vocab_size,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=theirs.max_position_embeddings,
            rope_parameters=theirs.rope_parameters,
            rms_norm_eps=theirs.rms_norm_eps,
            tie_word_embeddings=True,
            # Several times as fast as the fused one in training on a CPU.
            attn_implementation="eager",
            bos_token_id=theirs.bos_token_id,
            eos_token_id=theirs.eos_token_id,
            pad_token_id=theirs.pad_token_id,
        )
        self.ssm = LlamaForCausalLM(config)
        self.ssm.model.embed_tokens.requires_grad_(False)
        embedding = teacher.model.embed_tokens.weight.detach()
        centred = embedding - embedding.mean(0)
        _, _, directions = torch.linalg.svd(centred, full_matrices=False)
        num_content = args.hidden - RESERVED
        scale = 0.05 / (embedding @ directions[:num_content].T).std()
        ones = torch.full((len(embedding), 1), 4 * 0.05 * math.sqrt(num_content))
        self.register_buffer("embedding", torch.cat([embedding * scale, ones], 1))
        projection = torch.zeros(self.embedding.shape[1], args.hidden)
        projection[:-1, :num_content] = directions[:num_content].T
        projection[-1, -1] = 1
        self.projection = torch.nn.Parameter(projection)
        write_copy_heads(self.ssm, self.embedding @ projection)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, [*ids.shape, hidden]."""
        return self.embedding[ids] @ self.projection

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states [B, T, hidden] of token ids [B, T]."""
        return self.ssm.model(inputs_embeds=self.rows(ids)).last_hidden_state

    def save(self, tokenizer, draft_vocab: list[int], out: Path) -> None:
        """Write a bfloat16 SSM with the target's tokenizer and a draft vocabulary."""
        with torch.no_grad():
            self.ssm.model.embed_tokens.weight.copy_(self.embedding @ self.projection)
        copy.deepcopy(self.ssm).to(torch.bfloat16).save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "draft_vocab.json").write_text(json.dumps({"tokens": draft_vocab}))


def load(folder: Path) -> tuple[list[dict], list[dict]]:
    """(training, validation) samples; validation is the head of the file.

    Adds the key "label": LABEL records of prompt and answer; None where there are none
    yet.
    """
    rows = read_samples(folder)
    file = folder / "labels.bin"
    whole = file.stat().st_size // LABEL.itemsize if file.exists() else 0
    labels = np.memmap(file, LABEL, "r", shape=whole) if whole else np.empty(0, LABEL)
    end = 0
    for row in rows:
        start, end = end, end + len(row["prompt"]) + len(row["answer"])
        row["label"] = labels[start:end] if end <= len(labels) else None
    return rows[VALIDATION_PROMPTS:], rows[:VALIDATION_PROMPTS]


def batches(
    rows: list[dict], num_tokens: int, rng: random.Random
) -> Iterator[list[dict]]:
    """Batches of about num_tokens tokens with similar lengths, in random order."""
    lengths = [len(r["prompt"]) + len(r["answer"]) for r in rows]
    order = sorted(range(len(rows)), key=lambda i: lengths[i] + rng.random())
    groups: list[list[dict]] = [[]]
    for i in order:
        if groups[-1] and lengths[i] * (len(groups[-1]) + 1) > num_tokens:
            groups.append([])
        groups[-1].append(rows[i])
    rng.shuffle(groups)
    yield from groups


def collate(rows: list[dict]) -> tuple[torch.Tensor, ...]:
    """Token ids [B, T] and, for the N positions with a loss, what to predict.

    Returns:
        ids [B, T], places [N] in the flattened ids, tokens [N, K] and their
        probabilities [N, K].
    """
    texts = [row["prompt"] + row["answer"] for row in rows]
    length = max(map(len, texts))
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    places, tokens, weights = [], [], []
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        ids[i, : len(text)] = torch.tensor(text)
        if row["label"] is None:
            first, last = len(row["prompt"]) - 1, len(text) - 1
            token = np.zeros((last - first, LABEL["token"].shape[0]), np.int64)
            token[:, 0] = row["answer"]
            weight = np.zeros(token.shape, np.float32)
            weight[:, 0] = 1
        else:
            first, last = 0, len(text)
            token = row["label"]["token"].astype(np.int64)
            weight = row["label"]["probability"].astype(np.float32)
            # Greedy trees need the first token most.
            weight = 0.5 * weight / weight.sum(1, keepdims=True)
            weight[:, 0] += 0.5
        places.append(torch.arange(first, last) + i * length)
        tokens.append(torch.from_numpy(token))
        weights.append(torch.from_numpy(weight))
    return ids, torch.cat(places), torch.cat(tokens), torch.cat(weights)


def repeated(ids: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, ...]:
    """What `collate` gives, for texts of shuffled tokens that repeat themselves."""
    length = ids.shape[1]
    period = rng.randrange(length // 4, max(length // 2, length // 4 + 1))
    shuffled = ids.flatten()[torch.randperm(ids.numel())].view(ids.shape)
    ids = shuffled[:, torch.arange(length) % period]
    columns = torch.arange(period, length - 1)
    places = (torch.arange(len(ids))[:, None] * length + columns).flatten()
    tokens = ids[:, 1:][:, columns].reshape(-1, 1)
    return ids, places, tokens, torch.ones(tokens.shape)


def sampled_loss(model: FactoredSSM, hidden, tokens, weights, frequent):
    """Cross-entropy over the frequent, the wanted and a sample of all other tokens.

    The sample stands for all tokens left out, so its logits get the log of how many
    each one stands for. Most of a small SSM's time goes into its head otherwise.

    Args:
        model: The SSM.
        hidden: [N, H].
        tokens: [N, K] wanted.
        weights: [N, K] their probabilities, a row's sum is 1.
        frequent: [F] tokens always among the outputs.
    """
    vocab = model.embedding.shape[0]
    kept = torch.zeros(vocab, dtype=torch.bool)
    kept[frequent] = True
    kept[tokens] = True
    others = torch.nonzero(~kept)[:, 0]
    sample = others[torch.randperm(len(others))[:SAMPLED_TOKENS]]
    columns = torch.cat([torch.nonzero(kept)[:, 0], sample])
    place = torch.empty(vocab, dtype=torch.long)
    place[columns] = torch.arange(len(columns))
    logits = (hidden.bfloat16() @ model.rows(columns).bfloat16().T).float()
    logits[:, -len(sample) :] += math.log(len(others) / len(sample))
    wanted = logits.log_softmax(-1).gather(1, place[tokens])
    return -(weights * wanted).sum(-1).mean()


def optimizers_of(model: FactoredSSM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for norms and the embedding's projection."""
    layers = [p for p in model.ssm.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.ssm.model.parameters() if p.ndim == 1]
    return [
        torch.optim.Muon(layers, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [*norms, model.projection],
            betas=(0.9, 0.95),
            weight_decay=0.01,
            fused=True,
        ),
    ]


def train(args: argparse.Namespace) -> None:
    """Fit the SSM for args.minutes; the learning rate follows the clock."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    target = args.target or assets.smollm2()
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = FactoredSSM(target, args)
    rng = random.Random(args.seed)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizers = optimizers_of(model)
    print(f"{sum(p.numel() for p in model.ssm.parameters()) / 1e6:.1f} M parameters")
    started, step = time.time(), 0
    losses = {kind: collections.deque([0.0], 100) for kind in ("text", "copy")}
    budget, saved = args.minutes * 60, time.time()
    for epoch in itertools.count():
        # The files may still be growing: every epoch reads what is there.
        rows, _ = load(args.data)
        counts = collections.Counter(t for row in rows for t in row["answer"])
        draft_vocab = [t for t, _ in counts.most_common(DRAFT_VOCAB)]
        frequent = torch.tensor(draft_vocab[:FREQUENT_TOKENS])
        for group in batches(rows, args.batch_tokens, rng):
            spent = (time.time() - started) / budget
            if spent >= 1:
                model.save(tokenizer, draft_vocab, args.out)
                return
            warm = min(1.0, (step + 1) / 100)
            decay = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * spent))
            for group_ in itertools.chain(*(o.param_groups for o in optimizers)):
                group_["lr"] = args.lr * warm * decay
            ids, places, tokens, weights = collate(group)
            kind = "copy" if rng.random() < REPEATED else "text"
            if kind == "copy":
                ids, places, tokens, weights = repeated(ids, rng)
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model.hidden(ids).flatten(0, 1)[places]
            loss = sampled_loss(model, hidden, tokens, weights, frequent)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(learned, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses[kind].append(loss.item())
            step += 1
            if step % 100 == 0:
                means = " ".join(
                    f"{kind} {sum(mine) / len(mine):.3f}"
                    for kind, mine in losses.items()
                )
                print(
                    f"epoch {epoch} step {step} {100 * spent:.0f}% loss {means}",
                    flush=True,
                )
            if time.time() - saved > args.save_minutes * 60:
                model.save(tokenizer, draft_vocab, args.out)
                saved = time.time()


@torch.inference_mode()
def evaluate(args: argparse.Namespace) -> None:
    """Print hit rates by rank on the validation answers."""
    torch.set_num_threads(args.threads)
    ssm = LlamaForCausalLM.from_pretrained(args.ssm, dtype=torch.float32).eval()
    _, rows = load(args.data)
    for kind in ("chat", "code"):
        mine = [r for r in rows if r["kind"] == kind]
        hits, loss, total = torch.zeros(5), 0.0, 0
        for row in mine:
            ids = torch.tensor([row["prompt"] + row["answer"]])
            first = len(row["prompt"])
            wanted = ids[0, first:]
            logits = ssm(ids).logits[0, first - 1 : -1]
            top = logits.topk(5).indices == wanted[:, None]
            hits += top.float().cumsum(-1).sum(0)
            loss += torch.nn.functional.cross_entropy(
                logits, wanted, reduction="sum"
            ).item()
            total += len(wanted)
        top_k = " ".join(f"top-{k + 1} {hits[k] / total:.3f}" for k in (0, 1, 2, 4))
        print(f"{kind}: {len(mine)} prompts, loss {loss / total:.3f}, {top_k}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    stage = stages.add_parser("train")
    stage.add_argument("--out", type=Path, required=True)
    stage.add_argument("--hidden", type=int, default=224)
    stage.add_argument("--intermediate", type=int, default=640)
    stage.add_argument("--layers", type=int, default=3)
    stage.add_argument("--lr", type=float, default=2e-3)
    stage.add_argument("--batch-tokens", type=int, default=4096)
    stage.add_argument("--minutes", type=float, default=60)
    stage.add_argument("--save-minutes", type=float, default=5)
    stage.add_argument("--target", type=Path, help="default: SmolLM2-135M-Instruct")
    stage.add_argument("--seed", type=int, default=0)
    stage = stages.add_parser("evaluate")
    stage.add_argument("--ssm", type=Path, required=True)
    for stage in stages.choices.values():
        stage.add_argument("--data", type=Path, required=True)
        stage.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    {"train": train, "evaluate": evaluate}[args.stage](args)


if __name__ == "__main__":
    main()
