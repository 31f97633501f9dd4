"""R2: which sources of trees pay: SSM pools, lookups and both, against plain vLLM.

    python benchmarks/pools.py [--data mtbench] [--temperature 0.7] [--prompts 80]
    python benchmarks/pools.py --pool wider='{"model": "SSM", "tree": [2, 2, 1]}' ...

All engines live in this process and answer each prompt in turn; ratios to plain vLLM
are medians over prompts. Tokens per step do not depend on the machine.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

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
        help="speculative_config without method; the default is a table of pools",
    )
    parser.add_argument("--data", default="mtbench", help="mtbench, humaneval, a JSONL")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    target = assets.smollm2()
    prompts = assets.prompt_ids(args.data, args.prompts)
    engines = {}
    for name, config in {"plain": None, **dict(args.pool or POOLS.items())}.items():
        if config is not None:
            config = {
                "method": "specinfer",
                "num_speculative_tokens": args.nodes,
                **config,
            }
        engines[name] = LLM(
            model=str(target),
            dtype=args.dtype,
            max_model_len=2048,
            max_num_seqs=8,
            speculative_config=config,
        )

    def answer(name: str, i: int) -> tuple[float, list[int]]:
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, seed=i
        )
        start = time.perf_counter()
        (output,) = engines[name].generate(
            {"prompt_token_ids": prompts[i]}, params, use_tqdm=False
        )
        tokens = list(output.outputs[0].token_ids)
        return len(tokens) / (time.perf_counter() - start), tokens

    for name in engines:
        answer(name, 0)
    steps = {name: StepCounter(llm) for name, llm in engines.items()}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    num_tokens = dict.fromkeys(engines, 0)
    num_same = dict.fromkeys(engines, 0)
    for i in range(len(prompts)):
        order = list(engines)
        order = order[i % len(order) :] + order[: i % len(order)]
        texts = {}
        for name in order:
            rate, texts[name] = answer(name, i)
            rates[name].append(rate)
            num_tokens[name] += len(texts[name])
        for name, text in texts.items():
            num_same[name] += text == texts["plain"]
    print(f"{len(prompts)} prompts of {args.data}, temperature {args.temperature}")
    print("| sources | tokens per step | tokens/s | ratio, median | identical |")
    print("|---|---|---|---|---|")
    for name in engines:
        # One step of each prompt reads it and gives its first token.
        decoded = num_tokens[name] - len(prompts)
        per_step = decoded / (steps[name].count - len(prompts))
        ratios = [a / b for a, b in zip(rates[name], rates["plain"], strict=True)]
        print(
            f"| {name} | {per_step:.2f} "
            f"| {statistics.median(rates[name]):.1f} "
            f"| {statistics.median(ratios):.2f} | {num_same[name]} |"
        )


if __name__ == "__main__":
    main()
