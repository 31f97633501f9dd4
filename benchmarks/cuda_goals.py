"""The engine on a GPU: what it costs. Parts of `cuda_engine.py`."""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_specinfer import assets
from vllm_specinfer.evidence.bench import BenchSettings, bench
from vllm_specinfer.evidence.engines import ROOM_FOR_DRAFTS, runner_of, start_engine
from vllm_specinfer.evidence.tables import report

# Steps that the profiler sees.
PROFILED_STEPS = 20
# Steps of a batch that do not count: prompts, and what is compiled when first used.
FIRST_STEPS = 4
# Steps that the profiler sees without counting them: it starts up.
UNCOUNTED_STEPS = 5
# Microseconds from one kernel to the next, in a graph, too; for more the host is late.
KERNEL_GAP = 3.0
# Seconds that a part whose deadline has come may need to end.
ENDING = 45


def kernels(args: argparse.Namespace) -> str:
    """The times of `cuda_kernels.py` that fit into this part's time."""
    import cuda_kernels

    deadline = str(args.end - time.monotonic() - ENDING)
    cuda_kernels.main(["--time-only", "--out", str(args.out), "--deadline", deadline])
    return f"attention.csv, .md and .png in {args.out}\n"


def steps(args: argparse.Namespace) -> str:
    """Seconds of a step by nodes per tree, all nodes in every step."""
    prompts = assets.prompt_ids(args.data, max(args.batches), args.target)
    model = args.target, args.first_ssm, prompts, args.max_tokens, {}
    return _steps(args, "steps", _static_engine(args, *model), prompts)


def steps_8b(args: argparse.Namespace) -> str:
    """`steps` of a large target, its weights and the SSM's random; and `_busy`.

    Raises:
        ValueError: As `_busy`.
    """
    target, ssm, prompts, engine = _large(args)
    num_tokens = max(args.max_tokens, _num_profiled(args))
    llm = _static_engine(args, target, ssm, prompts, num_tokens, engine)
    return _steps(args, "steps_8b", llm, prompts) + "\n" + _busy(args, llm, prompts)


def _large(args: argparse.Namespace) -> tuple[str, str, list[list[int]], dict]:
    """Target, SSM, prompts, and what an engine must know of them."""
    target, ssm = args.out / "target", args.out / "ssm"
    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    _config(args.shape).save_pretrained(target)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    # Of an SSM the engine reads the weights, whatever becomes of the target's.
    _write_random(ssm, args.shape | small | heads)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(args.shape["vocab_size"]) for _ in range(100)]
        for _ in range(max(args.batches))
    ]
    engine = {"load_format": "dummy", "skip_tokenizer_init": True}
    engine["gpu_memory_utilization"] = 0.6
    return str(target), str(ssm), prompts, engine


def _config(shape: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    names = {"architectures": ["LlamaForCausalLM"], "eos_token_id": None}
    return LlamaConfig(**shape, **names, bos_token_id=None)


def _write_random(folder: Path, shape: dict[str, Any]) -> None:
    import torch
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(_config(shape)).to(torch.bfloat16).save_pretrained(folder)


def _steps(
    args: argparse.Namespace, out: str, llm: Any, prompts: list[list[int]]
) -> str:
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


def _num_profiled(args: argparse.Namespace) -> int:
    """Tokens that no request may exceed while the profiler looks on."""
    num_steps = FIRST_STEPS + UNCOUNTED_STEPS + PROFILED_STEPS
    return num_steps * (1 + max(args.nodes))


def _busy(args: argparse.Namespace, llm: Any, prompts: list[list[int]]) -> str:
    """The part of a speculative step's time in which the device works, `busy`, and in
    which it does not wait for the host, `fed`.

    Raises:
        ValueError: There is no device that the profiler sees, or a text has ended
            before the profiler had.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, schedule

    most_nodes, num_steps = max(args.nodes), UNCOUNTED_STEPS + PROFILED_STEPS
    speculator, engine = runner_of(llm).speculator, llm.llm_engine
    params, rows = _plain_text(_num_profiled(args)), []
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
        of_step = {"busy": busy_share(spans), "fed": busy_share(spans, KERNEL_GAP)}
        rows.append({"batch": batch, "nodes": num_nodes, **of_step})
        shown = report(args.out, "busy", rows, x="batch", y="busy", line="nodes")
    return shown


def busy_share(spans: list[tuple[float, float]], least_gap: float = 0.0) -> float:
    """The part of the time from the first start to the last end that spans cover.

    Args:
        spans: Starts and ends.
        least_gap: Shorter gaps between spans are covered, too.

    Raises:
        ValueError: There is no span.
    """
    if not spans:
        raise ValueError("the profiler must see work of a device; got none")
    spans = sorted(spans)
    first = until = spans[0][0]
    covered = 0.0
    for start, end in spans:
        if start - until < least_gap:
            start = min(start, until)
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered / (until - first)


def speed(args: argparse.Namespace) -> str:
    """Tokens/s of plain vLLM, its chain of drafts, and specinfer."""
    chain = {"method": "draft_model", "model": args.first_ssm}
    chain["num_speculative_tokens"] = 4
    try:
        return _speed(args, {"draft_model": chain})
    except Exception as error:  # vLLM's own; the rest is to be measured all the same
        return f"without draft_model: {error}\n{_speed(args, {})}"


def _speed(args: argparse.Namespace, configs: dict[str, dict[str, Any]]) -> str:
    settings = BenchSettings(
        args.target,
        {**configs, "specinfer": {"method": "specinfer", "model": args.ssm}},
        [args.data],
        batches=args.batches,
        max_prompts=args.prompts,
        max_tokens=args.max_tokens,
        ignore_eos=True,
        engine={"dtype": args.dtype},
        starts=1,
    )
    return bench(args.out / "speed", settings)


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
