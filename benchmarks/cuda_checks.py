"""The engine on a GPU: whether it is right. Parts of `cuda_engine.py`."""

import argparse
import os
import threading
from collections import Counter
from typing import Any

from vllm_specinfer import assets
from vllm_specinfer.evidence.engines import ROOM_FOR_DRAFTS, start_engine
from vllm_specinfer.evidence.tables import markdown_of, write_csv


def kernel_checks(args: argparse.Namespace) -> str:
    """Whether the kernels give what their definitions give.

    Raises:
        AssertionError: One does not.
    """
    import cuda_kernels

    if cuda_kernels.main(["--check-only"]):
        raise AssertionError("a kernel is wrong, as said above")
    return "all kernels are right\n"


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
        ssms = [args.first_ssm, *(["suffix"] if name == "suffix" else [])]
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


def equality_async(args: argparse.Namespace) -> str:
    """`equality` with asynchronous scheduling."""
    return equality(args, "equality_async", enforce_eager=True)


def equality_graphs(args: argparse.Namespace) -> str:
    """`equality` with graphs and asynchronous scheduling."""
    return equality(args, "equality_graphs", async_scheduling=None)


def equality_offload(args: argparse.Namespace) -> str:
    """`equality` with 0.1 GiB of each engine's weights on the host."""
    return equality(args, "equality_offload", enforce_eager=True, cpu_offload_gb=0.1)


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


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
