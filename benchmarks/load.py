"""P5, P12: specinfer against plain vLLM at every load, and with an SSM that is wrong.

    python benchmarks/load.py [--ssms good wrong] [--temperatures 0 1]
        [--batches 1 2 4 8 16 32] [--contexts 0 2048] [--out FOLDER]

All engines live in this process; in each cell they answer the same MT-bench prompts in
turn, so many at once, with so many tokens of chat before them (0: none). Ratios to
plain vLLM are medians over the rounds; the first is not counted, as the budget learns
from it. FOLDER gets cells.csv and cells.png.
"""

import argparse
import csv
import itertools
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import forget

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"
COLUMNS = ("ssm", "temperature", "context", "batch", "plain tokens/s", "tokens/s")
COLUMNS += ("ratio", "least", "most", "first token")


def wrong_ssm(folder: Path) -> str:
    """The shipped SSM with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(POOL / "ssm0", folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def with_context(prompts: list[list[int]], length: int) -> list[list[int]]:
    """Each prompt behind so many tokens of the other ones, in another order each."""
    if not length:
        return prompts
    long = []
    for i, prompt in enumerate(prompts):
        others = itertools.chain(*prompts[i + 1 :], *prompts[:i], *prompts)
        long.append([*itertools.islice(others, length - len(prompt)), *prompt])
    return long


def answer(llm: Any, prompts: list[list[int]], params: list[Any]) -> tuple[float, ...]:
    """Tokens per second of all requests together, median seconds to the first."""
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    took = time.perf_counter() - start
    num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    first = statistics.median(o.metrics.first_token_latency for o in outputs)
    return num_tokens / took, first


def plot(cells: list[dict[str, Any]], file: Path) -> None:
    """Tokens per second over plain by batch, a line per SSM, temperature, context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key, group in itertools.groupby(cells, lambda c: [c[k] for k in COLUMNS[:3]]):
        rows = list(group)
        label = f"{key[0]} SSM, T = {key[1]}, context {key[2] or 'short'}"
        axes.plot(
            [str(c["batch"]) for c in rows],
            [c["ratio"] for c in rows],
            "o-",
            label=label,
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="batch", ylabel="tokens/s over plain vLLM")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Measure, print a Markdown table, write files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ssms", nargs="+", default=["good"], choices=("good", "wrong")
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=3, help="after the first")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scheduler", default="auto")
    parser.add_argument("--out", type=Path, default=Path("runs/load"))
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    common: dict[str, Any] = {
        "model": str(assets.smollm2()),
        "dtype": args.dtype,
        "max_model_len": max(args.contexts) + 1024,
        "max_num_seqs": max(args.batches),
        "disable_log_stats": False,
    }
    engines = {"plain": LLM(**common)}
    with tempfile.TemporaryDirectory() as folder:
        ssms = {"good": str(POOL)}
        if "wrong" in args.ssms:
            ssms["wrong"] = wrong_ssm(Path(folder) / "wrong")
        for name in args.ssms:
            config = {
                "method": "specinfer",
                "model": ssms[name],
                "scheduler": args.scheduler,
            }
            engines[name] = LLM(**common, speculative_config=config)
    prompts = assets.prompt_ids("mtbench", 80)
    cells = []

    def measure(batch: int, temperature: float, texts: list[list[int]]) -> None:
        """All engines on one batch size."""
        for llm in engines.values():
            forget(llm)
        rounds: dict[str, list[tuple[float, ...]]] = {name: [] for name in engines}
        for number in range(args.rounds + 1):
            seeds = range(number * batch, (number + 1) * batch)
            params = [
                SamplingParams(
                    temperature=temperature,
                    max_tokens=args.max_tokens,
                    ignore_eos=True,
                    seed=seed,
                )
                for seed in seeds
            ]
            chosen = [texts[seed % len(texts)] for seed in seeds]
            for name in list(engines)[:: 1 if number % 2 else -1]:
                rounds[name].append(answer(engines[name], chosen, params))
        plain = rounds.pop("plain")[1:]
        for name, found in rounds.items():
            pairs = list(zip(found[1:], plain, strict=True))
            ratios = [a[0] / b[0] for a, b in pairs]
            cell = (
                *(name, temperature, context, batch),
                *(statistics.median(x[0] for x in side) for side in (plain, found[1:])),
                *(statistics.median(ratios), min(ratios), max(ratios)),
                statistics.median(a[1] / b[1] for a, b in pairs),
            )
            cells.append(dict(zip(COLUMNS, cell, strict=True)))
            shown = (f"{x:.2f}" if isinstance(x, float) else str(x) for x in cell)
            print(f"| {' | '.join(shown)} |", flush=True)

    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for context in args.contexts:
        texts = with_context(prompts, context)
        for temperature, batch in itertools.product(args.temperatures, args.batches):
            measure(batch, temperature, texts)
    cells.sort(key=lambda c: [c[k] for k in COLUMNS[:3]])
    args.out.mkdir(parents=True, exist_ok=True)
    with open(args.out / "cells.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(cells)
    plot(cells, args.out / "cells.png")


if __name__ == "__main__":
    main()
