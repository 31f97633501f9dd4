"""R1: tokens per step and tokens/s of the verification rules, same trees and prompts.

    python benchmarks/verification_rules.py [--rules coupled mss] [--batch 1]

Every rule answers the MT-bench prompts at every temperature, each request with a seed.
Tokens per step do not depend on the machine; tokens/s want a quiet one. "naive" has the
trees of "mss" and only tests otherwise (SpecInfer, arXiv 2305.09781, table 3).
"""

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

from vllm_specinfer.evidence.engines import forget

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rules", nargs="+", default=["naive", "mss", "rrs", "coupled"]
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0]
    )
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--data", default="mtbench", help="mtbench, humaneval, a JSONL")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tree", type=json.loads, help="as in the configuration")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--ssm", default=str(POOL))
    parser.add_argument("--scheduler", default="auto")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    from vllm_specinfer import assets

    target = assets.smollm2()
    prompts = assets.prompt_ids(args.data, args.prompts)
    print("| rule | temperature | tokens per step | nodes per step | tokens/s |")
    print("|---|---|---|---|---|", flush=True)
    for rule in args.rules:
        config: dict[str, Any] = {
            "method": "specinfer",
            "model": args.ssm,
            "num_speculative_tokens": args.nodes,
            "verification": rule,
            "scheduler": args.scheduler,
        }
        if args.tree is not None:
            config["tree"] = args.tree
        llm = LLM(
            model=str(target),
            dtype=args.dtype,
            max_model_len=2048,
            max_num_seqs=args.batch,
            disable_log_stats=False,
            speculative_config=config,
        )

        def counts(llm: LLM = llm) -> dict[str, int]:
            found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
            prefix = "vllm:spec_decode_num_"
            names = ("drafts", "draft_tokens", "accepted_tokens")
            return {name: found.get(prefix + name, 0) for name in names}

        for temperature in args.temperatures:
            forget(llm)
            params = [
                SamplingParams(
                    temperature=temperature,
                    top_p=args.top_p,
                    top_k=args.top_k,
                    max_tokens=args.max_tokens,
                    seed=i,
                )
                for i in range(len(prompts))
            ]
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            before, start = counts(), time.perf_counter()
            outputs = llm.generate(inputs, params, use_tqdm=False)
            took = time.perf_counter() - start
            num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            step = {name: n - before[name] for name, n in counts().items()}
            print(
                f"| {rule} | {temperature} "
                f"| {1 + step['accepted_tokens'] / step['drafts']:.2f} "
                f"| {step['draft_tokens'] / step['drafts']:.1f} "
                f"| {num_tokens / took:.1f} |",
                flush=True,
            )
        del llm, counts
        gc.collect()


if __name__ == "__main__":
    main()
