"""The engine on a GPU: whether it is right, and what it costs.

    python benchmarks/cuda_engine.py [--out runs/cuda_engine] [--parts goals]

Checks, `--parts checks`:

- kernel_checks: the kernels beside their definitions (`cuda_kernels.py`).
- equality: greedy and seeded texts in float32, beside plain vLLM on Model Runner V2 and
  its own Triton attention; every text that differs is told with its first place. The
  host waits for every step.
- equality_async: the same with asynchronous scheduling, vLLM's default.
- equality_graphs: the same with CUDA graphs of verification and drafting, too, vLLM's
  default as well.
- equality_offload: the same with part of the target's weights in the host's memory.
- start: an engine as users start it, with vLLM's own sizes of graphs and K/V.
- waits: drafting, verification and what they prepare, with graphs, while torch raises
  where the host waits for the device without being meant to; and how often it means to.

Times, `--parts goals`, with graphs and asynchronous scheduling:

- kernels: one layer's attention beside others (`cuda_kernels.py`).
- steps_8b: milliseconds of a decoding step by nodes per tree and by batch, of a target
  of --shape with random weights, Llama 3 8B's; and in which part of the time of such
  steps the device works, with the most nodes and with none.
- speed: tokens/s of plain vLLM, its draft_model and specinfer, as `bench` measures.
- steps: as steps_8b, of --target; only where it is named.

The first run compiles for minutes: where a call must be short, give it fewer parts.
Each part is a process of its own that is ended when its share of --minutes is over,
with what the parts before it have left. What fails leaves its traceback in PART.txt,
and the others run. Every part of the goals leaves a CSV, a table and a picture.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_checks
import cuda_goals

from vllm_specinfer import assets
from vllm_specinfer.evidence.arguments import at_least
from vllm_specinfer.parsing import parse_options
from vllm_specinfer.refusals import CUDA_ENV
from vllm_specinfer.results import made_by, write_json

POOL = Path(__file__).parents[1] / "examples" / "pools" / "smollm2-135m"
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def main() -> None:
    """Run the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/cuda_engine"))
    names = [*PARTS, *GROUPS]
    parser.add_argument("--parts", nargs="+", choices=names, default=["goals"])
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--target", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--ssm", default=str(POOL))
    parser.add_argument("--data", default="mtbench", help="mtbench, humaneval, a JSONL")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=at_least(int, 2), default=64)
    parser.add_argument(
        "--batches", type=at_least(int, 1), nargs="+", default=[1, 8, 32]
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtype", default="bfloat16", help="of steps and speed")
    parser.add_argument("--shape", type=json.loads, default=LLAMA_3_8B)
    args = parser.parse_args()
    os.environ[CUDA_ENV] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # of each engine
    # vLLM's attention multiplies float32 as TF32 else.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    args.first_ssm = parse_options({"model": args.ssm}).ssms[0].model
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "machine.json", _machine())
    parts = [part for name in args.parts for part in GROUPS.get(name, [name])]
    if set(parts) - NEED_NO_TARGET:
        args.target = args.target or str(assets.smollm2())
    end = time.monotonic() + 60 * args.minutes
    failed = []
    while parts:
        shares = [SHARES.get(part, 1) for part in parts]
        now = time.monotonic()
        args.end = now + (end - now) * shares[0] / sum(shares)
        name = parts.pop(0)
        if not _runs(name, args):
            failed.append(name)
    print("failed: " + ", ".join(failed) if failed else "all parts ran")
    raise SystemExit(bool(failed))


CHECKS = (
    cuda_checks.kernel_checks,
    cuda_checks.equality,
    cuda_checks.equality_async,
    cuda_checks.equality_graphs,
    cuda_checks.equality_offload,
    cuda_checks.start,
    cuda_checks.waits,
)
GOALS = (cuda_goals.kernels, cuda_goals.steps_8b, cuda_goals.speed)
PARTS: dict[str, Callable[..., str]] = {
    part.__name__: part for part in (*CHECKS, *GOALS, cuda_goals.steps)
}
GROUPS = {
    "checks": [part.__name__ for part in CHECKS],
    "goals": [part.__name__ for part in GOALS],
}
NEED_NO_TARGET = {"kernel_checks", "kernels", "steps_8b"}
# Of the time; speed and waits start three engines, equality_graphs four.
SHARES = {"kernels": 2, "steps_8b": 3, "speed": 3}
SHARES |= {"kernel_checks": 2, "equality_graphs": 3, "waits": 2}


def _runs(name: str, args: argparse.Namespace) -> bool:
    """Run a part in a process and print what it found; whether it ended well."""
    started = time.monotonic()
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(name, args)
    )
    file = args.out / f"{name}.txt"
    file.write_text("the process ended before the part began\n")
    process.start()
    process.join(args.end - started)
    if process.exitcode is None:
        process.kill()
        process.join()
        print(f"\n{name}: ended, the time is over", flush=True)
        return False
    print(f"\n{name}: {time.monotonic() - started:.0f} s", flush=True)
    print(file.read_text(), flush=True)
    return process.exitcode == 0


def _run(name: str, args: argparse.Namespace) -> None:
    file = args.out / f"{name}.txt"
    file.write_text("the process ended before the part did\n")
    failed = False
    try:
        file.write_text(PARTS[name](args))
    except BaseException:
        failed = True
        file.write_text(traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failed)  # engines may take long to end, and nobody needs them


def _machine() -> dict[str, Any]:
    """What the numbers are of."""
    import torch

    devices = map(torch.cuda.get_device_name, range(torch.cuda.device_count()))
    driver = Path("/proc/driver/nvidia/version")
    return {
        "devices": list(devices),
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else None,
        "cuda": torch.version.cuda,
        **made_by(),
    }


if __name__ == "__main__":
    main()
