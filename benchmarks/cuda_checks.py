"""The engine on a GPU: whether it is right. Parts of `cuda_engine.py`."""

import argparse
import json
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
    prompts = assets.prompt_ids(args.data, min(16, args.prompts), args.target)
    longest = max(map(len, prompts)) + args.max_tokens + ROOM_FOR_DRAFTS
    engine = engine or {"async_scheduling": False, "enforce_eager": True}
    engine = {"dtype": "float32", **engine}
    shapes = {"best first": {}, "wide": {"tree": "4,2,2,1"}, "suffix": {}}
    plain = _plain_texts(args, prompts, longest, engine)
    rows, differ = [], 0
    # One engine after the other, and a table after each: the part may be ended.
    for name, shape in shapes.items():
        ssms = [args.first_ssm, *(["suffix"] if name == "suffix" else [])]
        spec = {"method": "specinfer", "ssms": ssms, "scheduler": "static", **shape}
        texts = _engine_texts(args, prompts, longest, spec, engine)
        for temperature, wanted in plain.items():
            pairs = list(zip(wanted, texts[temperature], strict=True))
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


# By temperature, a text for each prompt.
Texts = dict[str, list[list[int]]]


def _plain_texts(
    args: argparse.Namespace,
    prompts: list[list[int]],
    longest: int,
    engine: dict[str, Any],
) -> Texts:
    """Plain vLLM's, which another part may have left: compiled ones, or eager ones."""
    eager = bool(engine.get("enforce_eager"))
    file = args.out / f"plain_{'eager' if eager else 'compiled'}.json"
    told = {"target": args.target, "prompts": prompts, "max_tokens": args.max_tokens}
    if file.is_file():
        known = json.loads(file.read_text())
        if known["told"] == told:
            return known["texts"]
    plain = {}
    if not _on_cpu():
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        plain["attention_backend"] = "TRITON_ATTN"
    texts = _engine_texts(args, prompts, longest, None, engine | plain)
    file.write_text(json.dumps({"told": told, "texts": texts}))
    return texts


def _engine_texts(
    args: argparse.Namespace,
    prompts: list[list[int]],
    longest: int,
    config: dict[str, Any] | None,
    engine: dict[str, Any],
) -> Texts:
    """What an engine answers."""
    from vllm import SamplingParams

    llm = start_engine(args.target, longest, 8, config, engine)
    found = {}
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
        found[str(temperature)] = _texts(llm, prompts, params)
    return found


def start(args: argparse.Namespace) -> str:
    """An engine as users start it: vLLM measures what its graphs and K/V may take.

    The other parts say how large K/V is, which passes by that.

    Raises:
        AssertionError: A text is not plain decoding's.
    """
    prompts = assets.prompt_ids(args.data, min(16, args.prompts), args.target)
    longest = max(map(len, prompts)) + args.max_tokens + ROOM_FOR_DRAFTS
    engine = {"dtype": "float32"}
    plain = _plain_texts(args, prompts, longest, engine)
    spec = {"method": "specinfer", "model": args.ssm}
    usual = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}
    usual |= {"max_num_seqs": 256}
    texts = _engine_texts(args, prompts, longest, spec, engine | usual)
    same = sum(a == b for a, b in zip(plain["0.0"], texts["0.0"], strict=True))
    if same < len(prompts):
        raise AssertionError(f"{same} of {len(prompts)} greedy texts are identical")
    return f"an engine starts, and {same} of {len(prompts)} texts are identical\n"


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
