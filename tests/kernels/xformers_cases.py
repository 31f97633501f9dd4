"""xFormers' tree attention on a CPU, run by Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import cuda_backend_cases as backend
import torch
import tree_attention_cases as cases


def allow_cpu() -> None:
    """xFormers has its operations for GPUs only; the interpreter runs them here."""
    from xformers.ops.fmha import triton_splitk

    triton_splitk.FwOp.SUPPORTED_DEVICES.add("cpu")
    merge = triton_splitk.merge_attentions_varargs
    merge.register_kernel("cpu", merge._init_fn)


def steps() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Steps and options for both."""
    yield cases.step(cases.MIXED, dtype=torch.float16), {}
    wide = [cases.Request(300, 9), cases.Request(10, 20, is_tree=False)]
    for requests in (cases.MIXED, wide, [cases.Request(0, 70)]):
        yield cases.step(requests, dtype=torch.float16), {"chains": True}
    yield cases.step(cases.MIXED, 1, torch.float16, 64, 1, 7, block_size=32), {}
    no_trees = [cases.Request(20, 4, is_tree=False)]
    yield cases.step(no_trees, dtype=torch.float16), {}


def run(arguments: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """What xFormers writes, and the definition; NaN where neither does."""
    from vllm_specinfer.kernels import xformers

    query = arguments["query"]
    found, expected = query.new_full((2, *query.shape), torch.nan)
    xformers.tree_attention(**arguments, out=found, **options)
    cases.tree_attention_ref(**arguments, out=expected, **options)
    return found, expected


def layers() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the backend's layers give, with and without a prefill beside."""
    from vllm_specinfer.attention.xformers import XformersBackend

    outputs = []
    for requests in (backend.SMALL, backend.WITH_PREFILL):
        step = cases.step(requests, dtype=torch.float16, words=1)
        query = step["query"]
        builder = backend.make_builder(
            step["kv_cache"], query.dtype, query.shape[1], XformersBackend
        )
        metadata = builder.build(0, backend.common_metadata(step), tree=step["tree"])
        found = backend.attend(step, metadata, XformersBackend)
        outputs.append((found, backend.expected(step)))
    return outputs


def outputs() -> tuple[Any, Any]:
    """What both give."""
    allow_cpu()
    return [run(*step) for step in steps()], layers()
