"""Plain decoding on Model Runner V2 with the CPU kernels against vLLM's V1 runner.

One engine at a time, in a process of its own, V1 and V2 in turn; the ratio is of the
medians over the repeats. Run as

    python benchmarks/plain_decoding.py [--model FOLDER] [--repeats 3] [--tokens 128]

and read "V2/V1": at least 0.98 means that the kernels cost nothing. On a shared machine
read the CPU time a step instead, with one thread (``VLLM_CPU_OMP_THREADS_BIND=0``).
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# The V2 worker is one of the tests'.
sys.path.insert(0, str(Path(__file__).parents[1]))

from vllm_specinfer.evidence.engines import in_a_process

PROMPT_TOKENS = 64


def measure(
    args: argparse.Namespace, mode: str, batch: int, runner: str
) -> dict[str, Any]:
    """Decode in this process; the second and later passes are timed."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    kwargs: dict[str, Any] = {}
    if runner == "v2":
        from vllm_specinfer.hooks import cpu_v2

        cpu_v2.enable_in_frontend()
        kwargs["worker_cls"] = "tests.cpu_v2_worker.CPUV2Worker"
    from vllm import LLM, SamplingParams

    llm = LLM(
        args.model,
        enforce_eager=mode == "eager",
        max_model_len=PROMPT_TOKENS + args.tokens + 32,
        max_num_seqs=batch,
        enable_prefix_caching=False,
        **kwargs,
    )
    sampling = SamplingParams(
        temperature=args.temperature, max_tokens=args.tokens, ignore_eos=True
    )
    vocab = llm.get_tokenizer().vocab_size
    prompts = [
        {"prompt_token_ids": [(i * 7919 + j * 104729) % vocab for j in range(64)]}
        for i in range(batch)
    ]
    rates = []
    cpu_ms = []
    tokens: list[list[int]] = []
    for _ in range(1 + args.passes):
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        elapsed = time.perf_counter() - start
        cpu_ms.append((time.process_time() - cpu_start) * 1e3 / args.tokens)
        rates.append(batch * args.tokens / elapsed)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {
        "tokens_per_s": statistics.median(rates[1:]),
        "cpu_ms": statistics.median(cpu_ms[1:]),
        "tokens": tokens,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="SmolLM2-135M where it is not given")
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3, help="processes per runner")
    parser.add_argument("--passes", type=int, default=3, help="timed per process")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if args.model is None:
        from vllm_specinfer import assets

        args.model = str(assets.smollm2())
    print("mode      batch  V1 tok/s  V2 tok/s  V2/V1  V1 cpu ms/step  V2  same text")
    for mode in args.modes:
        for batch in args.batches:
            rates: dict[str, list[float]] = {"v1": [], "v2": []}
            cpu: dict[str, list[float]] = {"v1": [], "v2": []}
            texts: dict[str, list[list[int]]] = {}
            for repeat in range(args.repeats):
                order = ("v1", "v2") if repeat % 2 == 0 else ("v2", "v1")
                for runner in order:
                    result = in_a_process(measure, args, mode, batch, runner)
                    rates[runner].append(result["tokens_per_s"])
                    cpu[runner].append(result["cpu_ms"])
                    texts[runner] = result["tokens"]
            v1, v2 = (statistics.median(rates[runner]) for runner in ("v1", "v2"))
            c1, c2 = (statistics.median(cpu[runner]) for runner in ("v1", "v2"))
            same = "-" if args.temperature else str(texts["v1"] == texts["v2"])
            print(
                f"{mode:9} {batch:5}  {v1:8.1f}  {v2:8.1f}  {v2 / v1:5.3f}  "
                f"{c1:14.2f} {c2:6.2f}  {same}",
                flush=True,
            )


if __name__ == "__main__":
    main()
