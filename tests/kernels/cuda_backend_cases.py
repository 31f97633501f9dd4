"""The CUDA backend's steps on a CPU: builders, layers, and what they attend."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import tree_attention_cases as cases
from tree_attention_cases import Request

SMALL = [Request(80, 9), Request(50, 3, is_tree=False), Request(20, 12)]
WITH_PREFILL = [*SMALL, Request(5, 70, is_tree=False)]
# Fewer rows than a tree may have.
FEW = [Request(80, 3), Request(50, 1, is_tree=False)]
# Not as the runner sorts them.
AFTER_PREFILL = [SMALL[1], Request(5, 70, is_tree=False), SMALL[0]]
NUM_SPECULATIVE_TOKENS = 20


def make_builder(
    kv_cache: torch.Tensor,
    dtype: torch.dtype,
    num_heads: int,
    backend: Any = None,
) -> Any:
    """A builder for up to 8 requests and 256 rows."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend

    _, num_kv_heads, block_size, width = kv_cache.shape
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: num_heads,
            get_num_kv_heads=lambda _: num_kv_heads,
            get_head_size=lambda: width // 2,
            rswa_window=None,
            dtype=dtype,
        ),
        parallel_config=None,
        compilation_config=SimpleNamespace(
            static_forward_context={}, cudagraph_mode=CUDAGraphMode.NONE
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=NUM_SPECULATIVE_TOKENS, parallel_drafting=False
        ),
    )
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=width // 2,
        dtype=dtype,
    )
    builder = (backend or CUDATreeAttentionBackend).get_builder_cls()
    return builder(spec, [], config, torch.device("cpu"))


def common_metadata(step: dict[str, Any]) -> Any:
    """vLLM's view of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    query_start_loc = step["query_start_loc"]
    return CommonAttentionMetadata(
        query_start_loc=query_start_loc,
        query_start_loc_cpu=query_start_loc,
        seq_lens=step["seq_lens"],
        num_reqs=len(step["seq_lens"]),
        num_actual_tokens=len(step["query"]),
        max_query_len=int(query_start_loc.diff().max()),
        max_seq_len=int(step["seq_lens"].max()),
        block_table_tensor=step["block_table"],
        slot_mapping=torch.zeros(len(step["query"]), dtype=torch.int64),
    )


def attend(
    step: dict[str, Any], metadata: Any, backend: Any = None, **kwargs: Any
) -> torch.Tensor:
    """One layer's output, NaN where nothing was written."""
    from vllm_specinfer.attention.cuda import CUDATreeAttentionBackend

    query, kv_cache = step["query"].contiguous(), step["kv_cache"]
    impl = (backend or CUDATreeAttentionBackend).get_impl_cls()(
        num_heads=query.shape[1],
        head_size=query.shape[2],
        scale=step["scale"],
        num_kv_heads=kv_cache.shape[1],
        alibi_slopes=None,
        sliding_window=kwargs.get("window"),
        kv_cache_dtype="fp8" if "k_scale" in step else "auto",
        logits_soft_cap=kwargs.get("softcap"),
        sinks=step.get("sinks"),
    )
    one = torch.tensor(1.0)
    layer = SimpleNamespace(
        _q_scale=one,
        _k_scale=step.get("k_scale", one),
        _v_scale=step.get("v_scale", one),
    )
    if "k_scale" in step:
        kv_cache = kv_cache.view(torch.uint8)
    out = torch.full_like(query, torch.nan)
    impl.forward(layer, query, query, query, kv_cache, metadata, out)
    return out


def expected(step: dict[str, Any], **options: Any) -> torch.Tensor:
    """The definition's output for all rows of all requests."""
    out = torch.full_like(step["query"], torch.nan).contiguous()
    cases.tree_attention_ref(**step, out=out, chains=True, **options)
    return out


def mixed_steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Steps with trees, some with a prefill that only vLLM's kernel can run."""
    outputs, bfloat16 = [], {"dtype": torch.bfloat16}
    for requests, from_row, options, kwargs in (
        (SMALL, None, {"softcap": 0.8}, {"sinks": True}),
        (WITH_PREFILL, 24, {"window": 64}, {}),
        (AFTER_PREFILL, 3, {}, {}),
        (WITH_PREFILL, 24, {}, {"kv_dtype": torch.float8_e4m3fn, **bfloat16}),
    ):
        step = cases.step(requests, words=1, **kwargs)
        query = step["query"]
        builder = make_builder(step["kv_cache"], query.dtype, query.shape[1])
        metadata = builder.build(0, common_metadata(step), tree=step["tree"])
        if from_row is None:
            assert metadata.prompts is None
        else:
            assert metadata.prompts.num_actual_tokens == len(query) - from_row
            assert metadata.first_prompt_row == from_row
        outputs.append((attend(step, metadata, **options), expected(step, **options)))
    return outputs


def replayed_steps(requests: list[Request]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A graph's metadata serves steps with these trees, none, and others."""
    step = cases.step(requests, words=1)
    lengths = step["seq_lens"].clone()
    query = step["query"]
    builder = make_builder(step["kv_cache"], query.dtype, query.shape[1])
    common = common_metadata(step)
    graph = builder.build_for_cudagraph_capture(common)
    assert graph.tile_rows == min(NUM_SPECULATIVE_TOKENS + 1, len(query))
    step["seq_lens"].copy_(lengths)
    tree = step["tree"]
    no_tree = replace(tree, is_tree=torch.zeros_like(tree.is_tree))
    one_tree = replace(tree, is_tree=torch.arange(len(tree.is_tree)) == 0)
    outputs = []
    for staged, means in ((tree, tree), (None, no_tree), (one_tree, one_tree)):
        builder.build(0, common, tree=staged)
        outputs.append((attend(step, graph), expected({**step, "tree": means})))
    return outputs


def blocks_of_layers() -> list[tuple[int, int]]:
    """Blocks of a request's 21 rows by KV heads, and how many they should be."""
    from vllm_specinfer.attention import cuda

    found = []
    for num_kv_heads, group in ((1, 8), (2, 4), (4, 2)):
        step = cases.step([Request(5, 21)], num_kv_heads=num_kv_heads, group=group)
        builder = make_builder(step["kv_cache"], torch.float32, 8)
        # Heads of a model's layers may differ; its config knows one number.
        builder.num_heads_kv = builder.headdim = 0
        metadata = builder.build(0, common_metadata(step), tree=step["tree"])
        rows = cuda.rows_per_block(metadata.tile_rows, group, 32, 4)
        found.append((metadata.row_blocks.count.item(), -(-21 // rows)))
    return found


def outputs() -> tuple[Any, ...]:
    """What layers and definition give."""
    replayed = replayed_steps(SMALL), replayed_steps(FEW)
    return mixed_steps(), *replayed, blocks_of_layers()
