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
- waits: drafting, verification and what they prepare, with graphs, while torch raises
  where the host waits for the device without being meant to; and how often it means to.

Times, `--parts goals`, with graphs and asynchronous scheduling:

- kernels: one layer's attention beside others (`cuda_kernels.py`).
- steps_8b: milliseconds of a decoding step by nodes per tree and by batch, of a target
  of --shape with random weights, Llama 3 8B's.
- busy: in which part of the time of such steps the device works, with the most nodes
  and with none.
- speed: tokens/s of plain vLLM, its draft_model and specinfer, as `bench` measures.
- steps: as steps_8b, of --target; only where it is named.

The first run compiles for minutes: where a call must be short, give it fewer parts.
Each part is a process of its own that is ended when its share of --minutes is over,
with what the parts before it have left. What fails leaves its traceback in PART.txt,
and the others run. Every part of the goals leaves a CSV, a table and a picture.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import runpy
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_specinfer import assets
from vllm_specinfer.evidence.bench import BenchSettings, bench
from vllm_specinfer.evidence.engines import (
    ROOM_FOR_DRAFTS,
    runner_of,
    start_engine,
)
from vllm_specinfer.evidence.tables import markdown_of, report, write_csv
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
# Steps that the profiler sees.
PROFILED_STEPS = 20
# Steps of a batch that do not count: prompts, and what is compiled when first used.
FIRST_STEPS = 4
# Steps that the profiler sees without counting them: it starts up.
UNCOUNTED_STEPS = 5
# Seconds that a part whose deadline has come may need to end.
ENDING = 45


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
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--dtype", default="bfloat16", help="of steps and speed")
    parser.add_argument("--shape", type=json.loads, default=LLAMA_3_8B)
    args = parser.parse_args()
    os.environ[CUDA_ENV] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # of each engine
    # vLLM's attention multiplies float32 as TF32 else.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "machine.json", _machine())
    end = time.monotonic() + 60 * args.minutes
    parts = [part for name in args.parts for part in GROUPS.get(name, [name])]
    if set(parts) - NEED_NO_TARGET:
        args.target = args.target or str(assets.smollm2())
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


def equality(args: argparse.Namespace, out: str = "equality", **engine: Any) -> str:
    """How many texts are those of plain decoding, and where others part.

    Raises:
        AssertionError: One differs; the table is written all the same.
    """
    from vllm import SamplingParams

    prompts = assets.prompt_ids(args.data, min(16, args.prompts), args.target)
    longest = max(map(len, prompts)) + args.max_tokens + ROOM_FOR_DRAFTS
    plain = {}
    if not _on_cpu():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        plain["attention_backend"] = "TRITON_ATTN"
    engine = engine or {"async_scheduling": False, "enforce_eager": True}
    engine = {"dtype": "float32", **engine}
    shapes = {"best first": {}, "wide": {"tree": "4,2,2,1"}, "suffix": {}}
    engines = {"plain": start_engine(args.target, longest, 8, None, engine | plain)}
    for name, shape in shapes.items():
        ssms = [_first_ssm(args.ssm), *(["suffix"] if name == "suffix" else [])]
        spec = {"method": "specinfer", "ssms": ssms, "scheduler": "static", **shape}
        engines[name] = start_engine(args.target, longest, 8, spec, engine)
    rows, differ = [], 0
    # The V1 runner, plain vLLM's default on a CPU, draws other random numbers.
    for temperature in (0.0,) if _on_cpu() else (0.0, 1.0):
        params = [
            SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=args.max_tokens,
                ignore_eos=True,
            )
            for i in range(len(prompts))
        ]
        texts = {name: _texts(llm, prompts, params) for name, llm in engines.items()}
        for name in shapes:
            pairs = list(zip(texts["plain"], texts[name], strict=True))
            parts = [_first_difference(*pair) for pair in pairs]
            places = [place for place in parts if place is not None]
            differ += len(places)
            rows.append(
                {
                    "temperature": temperature,
                    "trees": name,
                    "identical": len(pairs) - len(places),
                    "texts": len(pairs),
                    "first differences": " ".join(map(str, places)),
                }
            )
    write_csv(args.out / f"{out}.csv", rows)
    (args.out / f"{out}.md").write_text(markdown_of(rows))
    if differ:
        raise AssertionError(f"{differ} texts differ:\n{markdown_of(rows)}")
    return markdown_of(rows)


def waits(args: argparse.Namespace) -> str:
    """Steps of which some parts must not wait but where `device.read` does.

    Raises:
        RuntimeError: One waits.
    """
    import torch
    from vllm import SamplingParams

    from vllm_specinfer import device
    from vllm_specinfer.drafting.ahead import AheadDrafter
    from vllm_specinfer.model_state import TreeModelState
    from vllm_specinfer.speculator import TreeSpeculator
    from vllm_specinfer.verify.device_sampler import DeviceTreeSampler
    from vllm_specinfer.worker import TreeOutput

    prompts = assets.prompt_ids(args.data, 4, args.target)
    longest = max(map(len, prompts)) + args.max_tokens + ROOM_FOR_DRAFTS
    common = {"method": "specinfer", "scheduler": "static"}
    specs = {
        "coupled": {"model": args.ssm},
        "rrs": {"model": args.ssm, "verification": "rrs"},
        "lookups": {"ssms": ["ngram", "suffix"]},
    }
    engine = {"dtype": args.dtype}
    engines = {
        name: start_engine(args.target, longest, len(prompts), common | spec, engine)
        for name, spec in specs.items()
    }
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=args.max_tokens)
        for t in (0.0, 0.0, 1.0, 1.0)
    ]
    for llm in engines.values():
        _texts(llm, prompts, params)  # compiles what is compiled on first use
    calls, counts, senders = 0, Counter(), set()
    send = TreeOutput.get_output

    def get_output(output: TreeOutput) -> Any:
        senders.add(threading.get_ident())
        try:
            return send(output)
        finally:
            senders.discard(threading.get_ident())

    TreeOutput.get_output = get_output

    def counted(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            # Who sends a step's output may wait, in a thread of its own or not.
            counts[what] += threading.get_ident() not in senders
            return original(*given, **more)

        setattr(owner, name, call)

    def strict(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def call(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*given, **more)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        setattr(cls, name, call)

    strict(TreeSpeculator, "propose")
    strict(TreeSpeculator, "draft")
    strict(DeviceTreeSampler, "__call__")
    strict(TreeModelState, "prepare_attn")
    strict(TreeModelState, "prepare_inputs")
    counted(device, "_waited", "waits")
    counted(TreeSpeculator, "propose", "steps")
    counted(AheadDrafter, "launch", "ahead")
    counted(AheadDrafter, "look_up", "ahead")
    found = []
    for name, llm in engines.items():
        counts.clear()
        _texts(llm, prompts, params)
        found.append(
            f"{name}: {counts['steps']} steps, {counts['ahead']} of them drafted for "
            f"ahead, with {counts['waits']} waits\n"
        )
    return "".join(found) + f"{calls} calls; none waited without being meant to\n"


def kernel_checks(args: argparse.Namespace) -> str:
    """Whether the kernels give what their definitions give.

    Raises:
        AssertionError: One does not.
    """
    if _cuda_kernels("--check-only"):
        raise AssertionError("a kernel is wrong, as said above")
    return "all kernels are right\n"


def kernels(args: argparse.Namespace) -> str:
    """The times of `cuda_kernels.py` that fit into this part's time."""
    deadline = str(args.end - time.monotonic() - ENDING)
    _cuda_kernels("--time-only", "--out", str(args.out), "--deadline", deadline)
    return f"attention.csv, .md and .png in {args.out}\n"


def _cuda_kernels(*arguments: str) -> int:
    script = str(Path(__file__).with_name("cuda_kernels.py"))
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def steps(args: argparse.Namespace) -> str:
    """Seconds of a step by nodes per tree, all nodes in every step."""
    prompts = assets.prompt_ids(args.data, max(args.batches), args.target)
    return _steps(args, "steps", args.target, _first_ssm(args.ssm), prompts, {})


def steps_8b(args: argparse.Namespace) -> str:
    """`steps` of a large target, its weights and the SSM's random."""
    return _steps(args, "steps_8b", *_large(args))


def _large(args: argparse.Namespace) -> tuple[str, str, list[list[int]], dict]:
    """Target, SSM, prompts, and what an engine must know of them."""
    target, ssm = args.out / "target", args.out / "ssm"
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    _write_config(target, args.shape)
    _write_config(
        ssm, args.shape | small | {"num_attention_heads": 8, "num_key_value_heads": 8}
    )
    rng = random.Random(0)
    prompts = [
        [rng.randrange(args.shape["vocab_size"]) for _ in range(100)]
        for _ in range(max(args.batches))
    ]
    engine = {"load_format": "dummy", "skip_tokenizer_init": True}
    engine["gpu_memory_utilization"] = 0.6
    return str(target), str(ssm), prompts, engine


def _write_config(folder: Path, shape: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    names = {"architectures": ["LlamaForCausalLM"], "eos_token_id": None}
    LlamaConfig(**shape, **names, bos_token_id=None).save_pretrained(folder)


def _steps(
    args: argparse.Namespace,
    out: str,
    target: str,
    ssm: str,
    prompts: list[list[int]],
    engine: dict[str, Any],
) -> str:
    llm = _static_engine(args, target, ssm, prompts, args.max_tokens, engine)
    speculator, timings = runner_of(llm).speculator, []
    speculator.budget.observe_step = lambda _, seconds, __: timings.append(seconds)
    params = _plain_text(args.max_tokens)
    rows = []
    for batch in args.batches:
        for num_nodes in (0, *args.nodes):
            with _nodes(speculator, num_nodes):
                timings.clear()
                seconds, whole = _step_seconds(llm, prompts[:batch], params, timings)
            verification = statistics.median(whole[FIRST_STEPS:] or whole)
            if not num_nodes:
                plain = verification
            rows.append(
                {
                    "batch": batch,
                    "nodes": num_nodes,
                    "milliseconds": 1e3 * seconds,
                    "without drafting": 1e3 * verification,
                    "over one token": verification / plain,
                }
            )
            # Each time: the part may be ended.
            shown = report(
                args.out, out, rows, x="nodes", y="milliseconds", line="batch"
            )
    return shown


def _static_engine(
    args: argparse.Namespace,
    target: str,
    ssm: str,
    prompts: list[list[int]],
    max_tokens: int,
    engine: dict[str, Any],
) -> Any:
    """All nodes in every step, and graphs for the batches and nodes to be measured."""
    most = max(args.nodes)
    tree = {"max_depth": min(4, most), "max_width": min(16, most), "min_probability": 0}
    spec = {
        "method": "specinfer",
        "model": ssm,
        "scheduler": "static",
        "num_speculative_tokens": most,
        "tree": tree,
    }
    longest = max(map(len, prompts)) + max_tokens + ROOM_FOR_DRAFTS
    # Capturing more of a large target would take minutes.
    sizes = sorted({b * (1 + n) for b in args.batches for n in (0, *args.nodes)})
    graphs = {"compilation_config": {"cudagraph_capture_sizes": sizes}}
    engine = {"dtype": args.dtype, **graphs, **engine}
    return start_engine(target, longest, max(args.batches), spec, engine)


def _plain_text(max_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )


@contextmanager
def _nodes(speculator: Any, num_nodes: int) -> Iterator[None]:
    """Trees of so many nodes."""
    propose = speculator.propose

    def limited(*given: Any, **more: Any) -> Any:
        return propose(*given, **{**more, "num_speculative_tokens": num_nodes})

    speculator.propose = limited
    yield
    speculator.propose = propose


def busy(args: argparse.Namespace) -> str:
    """The part of a speculative step's time in which the device works.

    Raises:
        ValueError: There is no device that the profiler sees, or a text has ended
            before the profiler had.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, schedule

    target, ssm, prompts, engine = _large(args)
    most_nodes, num_steps = max(args.nodes), UNCOUNTED_STEPS + PROFILED_STEPS
    num_tokens = (FIRST_STEPS + num_steps) * (1 + most_nodes)
    llm = _static_engine(args, target, ssm, prompts, num_tokens, engine)
    speculator, engine = runner_of(llm).speculator, llm.llm_engine
    params, rows = _plain_text(num_tokens), []
    for batch, num_nodes in itertools.product(args.batches, (most_nodes, 0)):
        with _nodes(speculator, num_nodes):
            for i, ids in enumerate(prompts[:batch]):
                engine.add_request(str(i), {"prompt_token_ids": ids}, params)
            for _ in range(FIRST_STEPS):
                engine.step()
            with profile(
                activities=[ProfilerActivity.CUDA],
                schedule=schedule(
                    wait=0, warmup=UNCOUNTED_STEPS, active=PROFILED_STEPS, repeat=1
                ),
            ) as profiled:
                for _ in range(num_steps):
                    engine.step()
                    profiled.step()
            if (left := engine.get_num_unfinished_requests()) != batch:
                raise ValueError(f"all {batch} texts must be under way; got {left}")
            engine.abort_request([str(i) for i in range(batch)])
            while engine.has_unfinished_requests():
                engine.step()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiled.events()
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        ]
        rows.append({"batch": batch, "nodes": num_nodes, "busy": busy_share(spans)})
        shown = report(args.out, "busy", rows, x="batch", y="busy", line="nodes")
    return shown


def busy_share(spans: list[tuple[float, float]]) -> float:
    """The part of the time from the first start to the last end that spans cover.

    Raises:
        ValueError: There is no span.
    """
    if not spans:
        raise ValueError("the profiler must see work of a device; got none")
    spans = sorted(spans)
    first = until = spans[0][0]
    covered = 0.0
    for start, end in spans:
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered / (until - first)


def speed(args: argparse.Namespace) -> str:
    """Tokens/s of plain vLLM, its chain of drafts, and specinfer."""
    settings = BenchSettings(
        args.target,
        {
            "draft_model": {
                "method": "draft_model",
                "model": _first_ssm(args.ssm),
                "num_speculative_tokens": 4,
            },
            "specinfer": {"method": "specinfer", "model": args.ssm},
        },
        [args.data],
        batches=args.batches,
        max_prompts=args.prompts,
        max_tokens=args.max_tokens,
        ignore_eos=True,
        engine={"dtype": args.dtype},
        starts=1,
    )
    return bench(args.out / "speed", settings, ["benchmarks/cuda_engine.py"])


def equality_async(args: argparse.Namespace) -> str:
    """`equality` with asynchronous scheduling."""
    return equality(args, "equality_async", enforce_eager=True)


def equality_graphs(args: argparse.Namespace) -> str:
    """`equality` with graphs and asynchronous scheduling."""
    return equality(args, "equality_graphs", async_scheduling=None)


def equality_offload(args: argparse.Namespace) -> str:
    """`equality` with 0.1 GiB of each engine's weights on the host."""
    return equality(args, "equality_offload", enforce_eager=True, cpu_offload_gb=0.1)


CHECKS = (
    kernel_checks,
    equality,
    equality_async,
    equality_graphs,
    equality_offload,
    waits,
)
GOALS = (kernels, steps_8b, busy, speed)
PARTS: dict[str, Callable[..., str]] = {p.__name__: p for p in (*CHECKS, *GOALS, steps)}
GROUPS = {
    "checks": [part.__name__ for part in CHECKS],
    "goals": [part.__name__ for part in GOALS],
}
NEED_NO_TARGET = {"kernel_checks", "kernels", "steps_8b", "busy"}
# Of the time; speed starts three engines.
SHARES = {"speed": 3, "kernels": 2, "steps_8b": 2, "busy": 2}


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
        **made_by(sys.argv),
    }


def _texts(llm: Any, prompts: list[list[int]], params: list[Any]) -> list[list[int]]:
    prompts = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place where two texts of equal length differ."""
    for place, pair in enumerate(zip(one, other, strict=True)):
        if pair[0] != pair[1]:
            return place
    return None


def _step_seconds(
    llm: Any, prompts: list[list[int]], params: Any, timings: list[float]
) -> tuple[float, list[float]]:
    """The median over the steps in which all of a batch decode.

    Args:
        llm: The engine.
        prompts: The batch.
        params: Of all its requests.
        timings: Gets those that the engine takes itself.

    Returns:
        Seconds, and the engine's timings of the same steps.
    """
    engine = llm.llm_engine
    for i, ids in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    seconds = []
    while engine.get_num_unfinished_requests() == len(prompts):
        started = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started)
    found = list(timings)
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.median(seconds[FIRST_STEPS:-1] or seconds), found


def _first_ssm(path: str) -> str:
    """The model of a path, or the first one of a pool's."""
    return parse_options({"model": path}).ssms[0].model


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


if __name__ == "__main__":
    main()
