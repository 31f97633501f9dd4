"""R2: which sources of trees pay: SSM pools, lookups and both, against plain vLLM.

    python benchmarks/pools.py [--data mtbench humaneval] [--temperatures 0 0.7]
    python benchmarks/pools.py --pool wider='{"model": "SSM", "tree": [2, 2, 1]}' ...

All engines live in this process and answer each prompt (or batch of prompts) in turn;
ratios to plain vLLM are medians over these. "identical" compares with the V1 runner, so
only greedy texts. Tokens per step, of a whole batch, do not depend on the machine.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

from engines import forget

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SSM = str(Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m" / "ssm0")
POOLS: dict[str, dict[str, Any]] = {
    "ngram": {"model": "ngram"},
    "suffix": {"model": "suffix"},
    "SSM": {"model": SSM},
    "SSM, wider": {"model": SSM, "tree": {"max_width": 6}},
    "SSM, ngram": {"ssms": [SSM, "ngram"]},
    "SSM, suffix": {"ssms": [SSM, "suffix"]},
}


class StepCounter:
    """Counts the passes of an engine's target."""

    def __init__(self, llm: Any) -> None:
        self.count = 0
        executor = llm.llm_engine.engine_core.engine_core.model_executor
        self._execute = executor.execute_model
        executor.execute_model = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return self._execute(*args, **kwargs)


def named_pool(text: str) -> tuple[str, dict[str, Any]]:
    """NAME=JSON of the command line."""
    name, _, config = text.partition("=")
    return name, json.loads(config)


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--pool",
        type=named_pool,
        action="append",
        metavar="NAME=JSON",
        help="speculative_config, by default of method specinfer; "
        "the default is a table of pools",
    )
    parser.add_argument(
        "--data", nargs="+", default=["mtbench"], help="mtbench, humaneval, a JSONL"
    )
    parser.add_argument("--prompts", type=int, default=1000, help="of each set")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--scheduler", default="static")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    engines = {}
    for name, config in {"plain": None, **dict(args.pool or POOLS.items())}.items():
        if config is not None and "method" not in config:
            config = {
                "method": "specinfer",
                "num_speculative_tokens": args.nodes,
                "scheduler": args.scheduler,
                **config,
            }
        engines[name] = LLM(
            model=str(assets.smollm2()),
            dtype=args.dtype,
            max_model_len=2048,
            max_num_seqs=args.batch,
            speculative_config=config,
        )
    steps = {name: StepCounter(llm) for name, llm in engines.items()}

    def compare(prompts: list[list[int]], temperature: float) -> None:
        """Print one table."""
        for llm in engines.values():
            forget(llm)
        params = [
            SamplingParams(temperature=temperature, max_tokens=args.max_tokens, seed=i)
            for i in range(len(prompts))
        ]
        rates: dict[str, list[float]] = {name: [] for name in engines}
        num_tokens = dict.fromkeys(engines, 0)
        num_same = dict.fromkeys(engines, 0)
        before = {name: counter.count for name, counter in steps.items()}
        for i in range(0, len(prompts), args.batch):
            batch = [{"prompt_token_ids": ids} for ids in prompts[i : i + args.batch]]
            order = list(engines)
            order = order[i % len(order) :] + order[: i % len(order)]
            texts = {}
            for name in order:
                start = time.perf_counter()
                outputs = engines[name].generate(
                    batch, params[i : i + len(batch)], use_tqdm=False
                )
                took = time.perf_counter() - start
                texts[name] = [output.outputs[0].token_ids for output in outputs]
                count = sum(map(len, texts[name]))
                rates[name].append(count / took)
                num_tokens[name] += count
            for name, found in texts.items():
                pairs = zip(found, texts["plain"], strict=True)
                num_same[name] += sum(a == b for a, b in pairs)
        print("| sources | tokens per step | tokens/s | ratio, median | identical |")
        print("|---|---|---|---|---|")
        for name in engines:
            # One step of each batch reads its prompts and gives their first tokens.
            decoded = num_tokens[name] - len(prompts)
            num_batches = -(-len(prompts) // args.batch)
            per_step = decoded / (steps[name].count - before[name] - num_batches)
            ratios = [a / b for a, b in zip(rates[name], rates["plain"], strict=True)]
            print(
                f"| {name} | {per_step:.2f} | {statistics.median(rates[name]):.1f} "
                f"| {statistics.median(ratios):.2f} | {num_same[name]} |",
                flush=True,
            )

    warm = SamplingParams(max_tokens=16)
    for llm in engines.values():
        llm.generate({"prompt_token_ids": [1, 2, 3]}, warm, use_tqdm=False)
    for data in args.data:
        prompts = assets.prompt_ids(data, args.prompts)
        for temperature in args.temperatures:
            print(f"\n{len(prompts)} prompts of {data}, temperature {temperature}\n")
            compare(prompts, temperature)


if __name__ == "__main__":
    main()
