"""Where the milliseconds of a specinfer step go, at batch 1, and tokens/s over plain.

    python benchmarks/step_profile.py [--dtype bfloat16] [--eager] [--prompts 10]

Both engines live in this process and answer MT-bench prompts in turn; the ratio is the
median over prompts. "one level" is one SSM pass over a tree's level plus its head and
the choice of the next frontier; the goal is at most 3 ms on 2 cores.
"""

import argparse
import collections
import os
import statistics
import time
from pathlib import Path
from typing import Any

from vllm_specinfer.evidence.engines import forget, runner_of

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"

SCHEMA = {
    "type": "object",
    "properties": {
        "summary": {"type": "string"},
        "answer": {"type": "string"},
        "keywords": {"type": "array", "items": {"type": "string"}},
        "confidence": {"type": "integer"},
    },
    "required": ["summary", "answer", "keywords", "confidence"],
}


def timed(holder: Any, name: str, times: dict[str, list[float]], label: str) -> None:
    """Replace a method by one that notes how long each call takes."""
    method = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            times[label].append(time.perf_counter() - start)

    setattr(holder, name, call)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--data", default="mtbench", help="mtbench, humaneval, a JSONL")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--json", action="store_true", help="answers must follow a JSON schema"
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ssm", default=str(POOL))
    parser.add_argument("--scheduler", default="auto")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_specinfer import assets
    from vllm_specinfer.drafting.growth import TreeGrowth

    target = str(assets.smollm2())
    common: dict[str, Any] = {
        "model": target,
        "dtype": args.dtype,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "enforce_eager": args.eager,
        "disable_log_stats": False,
    }
    config = {
        "method": "specinfer",
        "model": args.ssm,
        "num_speculative_tokens": args.nodes,
        "scheduler": args.scheduler,
    }
    plain = LLM(**common)
    tree = LLM(**common, speculative_config=config)
    prompts = assets.prompt_ids(args.data, args.prompts)
    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=0,
        structured_outputs=StructuredOutputsParams(json=SCHEMA) if args.json else None,
    )
    for llm in (plain, tree):
        llm.generate({"prompt_token_ids": prompts[0]}, params, use_tqdm=False)
        forget(llm)

    times: dict[str, list[float]] = collections.defaultdict(list)
    runner = runner_of(tree)
    speculator = runner.speculator
    source = speculator.sources.ssms[0]
    for holder, name, label in (
        (runner, "execute_model", "target forward"),
        (runner, "sample", "target head and verification"),
        (runner.model_state, "commit", "  of it KV commit"),
        (speculator, "draft", "drafting"),
        (source.ssm, "catch_up", "  catch-up pass"),
        (source.ssm, "run_level", "  level: SSM pass"),
        (source.ssm, "likeliest", "  level: head"),
        (source.chooser, "choose", "  level: choice of children"),
        (TreeGrowth, "extend", "  level: frontier"),
    ):
        timed(holder, name, times, label)

    ratios, rates, num_tokens, spent, same = [], [], 0, 0.0, 0
    for i, prompt in enumerate(prompts):
        took, answers = {}, {}
        for name in ("plain", "tree") if i % 2 else ("tree", "plain"):
            llm = {"plain": plain, "tree": tree}[name]
            start = time.perf_counter()
            (output,) = llm.generate(
                {"prompt_token_ids": prompt}, params, use_tqdm=False
            )
            took[name] = time.perf_counter() - start
            answers[name] = list(output.outputs[0].token_ids)
        lengths = {name: len(answer) for name, answer in answers.items()}
        rates.append((lengths["plain"] / took["plain"], lengths["tree"] / took["tree"]))
        ratios.append(rates[-1][1] / rates[-1][0])
        same += answers["plain"] == answers["tree"]
        num_tokens += lengths["tree"]
        spent += took["tree"]
    steps = len(times["drafting"])
    # The V1 runner, plain vLLM's default on a CPU, draws other random numbers.
    compared = "" if args.temperature else f"; {same} texts identical"
    print(
        f"{len(prompts)} prompts, {args.dtype}, temperature {args.temperature}: plain "
        f"{statistics.median(r[0] for r in rates):.1f} tokens/s, specinfer "
        f"{statistics.median(r[1] for r in rates):.1f} tokens/s, ratio of each prompt: "
        f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}; {num_tokens / steps:.2f} tokens per step{compared}"
    )
    print(f"one step: {spent / steps * 1e3:.1f} ms")
    level = 0.0
    for label, values in times.items():
        median = statistics.median(values) * 1e3
        level += median if "level" in label else 0.0
        print(f"{label:30s} {len(values) / steps:5.2f} a step, {median:7.3f} ms each")
    print(f"one level: {level:.2f} ms")


if __name__ == "__main__":
    main()
