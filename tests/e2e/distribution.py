"""The joint distribution of sampled tokens, through the whole engine.

    python -m tests.e2e.distribution [--draws 200000] [--rules mss rrs coupled naive]

Many seeded requests draw `LENGTH` tokens each from a toy model of `VOCAB` tokens, and a
chi-square test compares the counts of all VOCAB ** LENGTH texts with the model's own
joint distribution, computed in float64 by transformers.
"""

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from tests.e2e import engine
from tests.e2e.models import noisy_copy, tiny_llama, untrained_head

VOCAB, LENGTH = 6, 3
PROMPT = [2, 5, 1, 0, 3]
RULES = ("mss", "rrs", "coupled", "naive")
# Small enough that drawn children are left out of the verified tree.
CONFIG = {
    "tree": {"max_depth": 3, "max_width": 3},
    "num_speculative_tokens": 4,
    "scheduler": "static",
}


def models(folder: Path) -> dict[str, str]:
    """A target, flat enough to draw every text now and then, an SSM and a head."""
    target = tiny_llama(folder / "target", seed=3, scale=2, vocab_size=VOCAB)
    return {
        "target": target,
        "ssm": noisy_copy(target, folder / "ssm", noise=2.0),
        "head": untrained_head(target, folder / "head"),
    }


@torch.inference_mode()
def joint(model: str, temperature: float) -> np.ndarray:
    """[VOCAB ** LENGTH] probabilities of the texts in lexicographic order."""
    llama = LlamaForCausalLM.from_pretrained(model, dtype=torch.float64)
    texts = torch.tensor(list(itertools.product(range(VOCAB), repeat=LENGTH)))
    prompt = torch.tensor(PROMPT).expand(len(texts), -1)
    logits = llama(torch.cat([prompt, texts], dim=1)).logits[:, len(PROMPT) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(2, texts[:, :, None]).sum(dim=(1, 2)).exp().numpy()


def job(
    models: dict[str, str],
    rule: str,
    draws: int,
    temperature: float = 1.0,
    mutation: str | None = None,
    sources: Sequence[str] = ("ssm",),
    min_probability: float | None = None,
) -> dict:
    """One engine job for `engine.run`; sources that are the same always agree."""
    tree = dict(CONFIG["tree"])
    if min_probability is not None:
        tree["min_probability"] = min_probability
    sampling = {"temperature": temperature, "max_tokens": LENGTH, "ignore_eos": True}
    return {
        "llm": {
            "model": models["target"],
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_seqs": 256,
            "enforce_eager": True,
            "speculative_config": {
                "method": "specinfer",
                "ssms": [models[name] for name in sources],
                "verification": rule,
                **CONFIG,
                "tree": tree,
            },
        },
        "prompts": [PROMPT] * draws,
        "params": [{**sampling, "seed": seed} for seed in range(draws)],
        "mutation": mutation,
    }


def p_value(result: dict, expected: np.ndarray) -> float:
    """Of the chi-square test; texts expected less than five times count as one."""
    places = VOCAB ** np.arange(LENGTH)[::-1]
    texts = np.array([tokens for (tokens,) in result["tokens"]]) @ places
    counts = np.bincount(texts, minlength=len(expected)).astype(float)
    wanted = expected * len(texts)
    rare = wanted < 5
    pooled = [np.append(x[~rare], x[rare].sum()) for x in (counts, wanted)]
    if not rare.any():
        pooled = [x[:-1] for x in pooled]
    seen, wanted = pooled
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    halves = torch.tensor([len(wanted) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


def main() -> None:
    """Run every rule and print its p-value."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=200_000)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument(
        "--sources", nargs="+", default=["ssm"], choices=["ssm", "head"]
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.5])
    args = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        made = models(Path(folder))
        for rule, temperature in itertools.product(args.rules, args.temperatures):
            wanted = job(made, rule, args.draws, temperature, sources=args.sources)
            (result,) = engine.run([wanted], timeout=7200)
            p = p_value(result, joint(made["target"], temperature))
            rate = 1 + result["accepted"] / result["drafts"]
            print(
                f"{rule} at temperature {temperature}: {args.draws} draws of {LENGTH} "
                f"tokens, p = {p:.4f}, {rate:.2f} tokens per step",
                flush=True,
            )
            if p < 0.01 / (len(args.rules) * len(args.temperatures)):
                failed.append(f"{rule} at {temperature}")
    if failed:
        raise SystemExit(f"wrong distribution: {', '.join(failed)}")


if __name__ == "__main__":
    main()
