"""P5: specinfer against plain vLLM under load, and with an SSM that is always wrong.

    python benchmarks/load.py [--batches 1 8 32] [--temperature 0.7] [--wrong]

Both engines live in this process; at each batch size they answer the same MT-bench
prompts in turn, so many at once. Ratios are medians over the rounds; the first is not
counted, as the budget learns from it.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import forget

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"


def wrong_ssm(folder: Path) -> str:
    """The shipped SSM with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(POOL / "ssm0", folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder))
    model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3, help="after the first")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--scheduler", default="auto")
    parser.add_argument("--wrong", action="store_true", help="an SSM of random weights")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    common: dict[str, Any] = {
        "model": str(assets.smollm2()),
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": max(args.batches),
    }
    prompts = assets.prompt_ids("mtbench", 80)
    with tempfile.TemporaryDirectory() as folder:
        ssm = wrong_ssm(Path(folder) / "wrong") if args.wrong else str(POOL)
        config = {"method": "specinfer", "model": ssm, "scheduler": args.scheduler}
        engines = {
            "plain": LLM(**common),
            "tree": LLM(**common, speculative_config=config),
        }
    print("| batch | plain tokens/s | specinfer tokens/s | ratio | range |")
    print("|---|---|---|---|---|", flush=True)
    for batch in args.batches:
        for llm in engines.values():
            forget(llm)
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(args.rounds + 1):
            first = number * batch
            inputs = [
                {"prompt_token_ids": prompts[(first + i) % len(prompts)]}
                for i in range(batch)
            ]
            params = [
                SamplingParams(
                    temperature=args.temperature,
                    max_tokens=args.max_tokens,
                    ignore_eos=True,
                    seed=first + i,
                )
                for i in range(batch)
            ]
            for name in list(engines)[:: 1 if number % 2 else -1]:
                start = time.perf_counter()
                engines[name].generate(inputs, params, use_tqdm=False)
                took = time.perf_counter() - start
                rates[name].append(batch * args.max_tokens / took)
        plain, tree = rates["plain"][1:], rates["tree"][1:]
        ratios = [b / a for a, b in zip(plain, tree, strict=True)]
        print(
            f"| {batch} | {statistics.median(plain):.1f} "
            f"| {statistics.median(tree):.1f} | {statistics.median(ratios):.2f} "
            f"| {min(ratios):.2f} to {max(ratios):.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
