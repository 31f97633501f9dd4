"""Tokens per second and preemptions where K/V blocks are short.

    python benchmarks/memory_pressure.py --nodes 32

One engine answers the same MT-bench prompts in turns: trees keep their slots, as vLLM
would have it, or give them up before a request is preempted.
"""

import argparse
import contextlib
import os
import time
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_specinfer import assets
from vllm_specinfer.scheduling.scheduler import SpecInferScheduler

COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "short steps": "vllm:specinfer_short_steps",
    "blocks given back": "vllm:specinfer_returned_blocks",
}


def counts(llm: LLM) -> dict[str, int]:
    """What the engine has counted so far."""
    found = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {name: int(found[metric]) for name, metric in COUNTERS.items()}


def main() -> None:
    """Print a line per turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="SmolLM2-135M where it is not given")
    parser.add_argument("--ssm", default="examples/pools/smollm2-135m/ssm0")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--scheduler", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    texts = [text[:700] for text in assets.mtbench()[: options.prompts]]
    target = options.target or str(assets.smollm2())
    prompts = [
        {"prompt_token_ids": ids} for ids in assets.chat_token_ids(target, texts)
    ]
    llm = LLM(
        target,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=options.batch,
        enforce_eager=True,
        block_size=options.block_size,
        num_gpu_blocks_override=options.blocks,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config={
            "method": "specinfer",
            "model": options.ssm,
            "scheduler": options.scheduler,
            "num_speculative_tokens": options.nodes,
        },
    )
    params = SamplingParams(
        temperature=0, max_tokens=options.max_tokens, ignore_eos=True
    )
    stock = mock.patch.object(SpecInferScheduler, "schedule", Scheduler.schedule)
    for turn in range(options.turns):
        for name, slots in (("kept", stock), ("given up", contextlib.nullcontext())):
            before, started = counts(llm), time.perf_counter()
            with slots:
                outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - started
            num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            now = counts(llm)
            numbers = ", ".join(f"{now[k] - before[k]} {k}" for k in COUNTERS)
            print(
                f"turn {turn}, slots {name}: {num_tokens / seconds:.1f} tokens/s, "
                f"{numbers}",
                flush=True,
            )


if __name__ == "__main__":
    main()
