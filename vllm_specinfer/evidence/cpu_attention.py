"""Attention kernels on a CPU, side by side on random data.

Shapes of SmolLM2-135M: 9 query heads, 3 KV heads, head size 64.

Dimension legend: R requests, T query rows, P positions of all blocks.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 9, 3, 64, 128


class Pages:
    """A layer's paged KV cache, and what it holds.

    Attributes:
        cache: [B, Hkv, block_size, 2 * D], as vLLM hands it to layers.
        parts: K's and V's view of it, as vLLM's kernel takes them.
        isa: vLLM's name of the kernel that the cache is for.
        key: [P, Hkv, D] of each position; `write` puts it into the cache.
        value: [P, Hkv, D] likewise.
    """

    def __init__(self, num_blocks: int, dtype: torch.dtype) -> None:
        """Random K and V, not written yet."""
        current_platform.import_kernels()
        torch.cpu._init_amx()  # in an engine its first product of bfloat16 does
        self.isa = _get_attn_isa(dtype, BLOCK_SIZE, HEAD_SIZE)
        pages = (num_blocks, NUM_KV_HEADS)
        self.cache = torch.zeros(*pages, BLOCK_SIZE, 2 * HEAD_SIZE, dtype=dtype)
        self.parts = self.cache.view(*pages, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, 2)
        shape = (num_blocks * BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
        self.key, self.value = torch.randn(2, *shape).to(dtype)

    def write(self) -> None:
        """Put `key` and `value` into the cache."""
        slots = torch.arange(len(self.key))
        ops.cpu_attn_reshape_and_cache(
            self.key, self.value, *self.parts, slots, self.isa
        )


def causal_attention(
    query: torch.Tensor,
    pages: Pages,
    out: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Callable[[], object]:
    """vLLM's kernel with its causal mask; its once-per-step scheduling is not in it.

    Args:
        query: [T, H, D], a request's rows its last positions.
        pages: The KV cache.
        out: [T, H, D], written.
        block_table: [R, max_blocks] int32.
        query_start_loc: [R + 1] int32.
        seq_lens: [R] int32.
    """
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        seq_lens=seq_lens,
        dtype=query.dtype,
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=pages.isa,
        enable_kv_split=True,
    )
    return lambda: ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=pages.parts[0],
        value_cache=pages.parts[1],
        output=out,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        scale=HEAD_SIZE**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=block_table,
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )


def measure(
    calls: dict[str, Callable[[], object]], seconds: float, percentile: float
) -> dict[str, float]:
    """Microseconds per call; rounds of all calls alternate.

    Args:
        calls: By name.
        seconds: To spend, if that is at least 15 rounds.
        percentile: Of the times, 50 for medians.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 15:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return {n: float(np.percentile(t, percentile)) * 1e6 for n, t in times.items()}
