"""A step over a paged KV cache on a CPU, and what attention makes of it.

Dimension legend: R requests, N rows of one request, H query heads, S KV positions,
D head size.
"""

import random
from dataclasses import dataclass, field

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn

from vllm_specinfer.kernels.cpu.page_layout import PageLayout
from vllm_specinfer.kernels.cpu.tree_attention import tree_attention
from vllm_specinfer.tree.rows import TreeRows

current_platform.import_kernels()
torch.cpu._init_amx()  # in an engine its first product of bfloat16 does

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
CACHES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not torch.cpu._is_avx512_supported(), reason="vLLM's kernels want AVX-512"
        ),
    )
    for name in FP8
]
# Of K and V, powers of two: what the tests expect divides by them exactly.
SCALES = 0.5, 4.0


def random_parents(num_rows: int, seed: int) -> list[int]:
    """Parent row of each row but the root; wide and deep trees mixed."""
    rng = random.Random(seed)
    return [-1] + [rng.randint(max(0, i - 6), i - 1) for i in range(1, num_rows)]


def chain(num_rows: int) -> list[int]:
    return list(range(-1, num_rows - 1))


@dataclass
class Request:
    """One request: `parents[j]` is the parent of the KV position context + j."""

    context: int
    parents: list[int]
    is_tree: bool = True
    rows: list[int] = field(default_factory=list)  # which nodes are query rows

    def __post_init__(self):
        self.rows = self.rows or list(range(len(self.parents)))
        self.seq_len = self.context + len(self.parents)

    def path(self, node: int) -> list[int]:
        """KV positions that a node sees: the context, its ancestors, itself."""
        nodes = []
        while node >= 0:
            nodes.append(self.context + node)
            node = self.parents[node]
        return [*range(self.context), *reversed(nodes)]


class Batch:
    """Requests in a paged cache that vLLM's own operator has written."""

    def __init__(
        self,
        requests: list[Request],
        dtype: torch.dtype = torch.float32,
        head_size: int = 64,
        num_kv_heads: int = 2,
        group: int = 2,
        block_size: int = 32,
        seed: int = 0,
        unwritten: float = torch.nan,
        cache_dtype: str = "auto",
        shared: dict[int, tuple[int, int]] | None = None,
        isa: str | None = None,
    ):
        """Request i may begin with so many blocks of an earlier one (`shared[i]`)."""
        torch.manual_seed(seed)
        self.requests, self.block_size = requests, block_size
        self.isa = isa or cpu_attn._get_attn_isa(
            dtype, block_size, head_size, cache_dtype
        )
        self.cache_dtype = cache_dtype
        self.k_scale, self.v_scale = SCALES if cache_dtype in FP8 else (1.0, 1.0)
        width = max(-(-r.seq_len // block_size) for r in requests)
        num_blocks = len(requests) * width + 3
        # Reading a slot that nobody wrote shows; the stock kernel does read them.
        self.kv_cache = torch.full(
            (num_blocks, num_kv_heads, block_size, 2 * head_size), unwritten
        ).to(FP8.get(cache_dtype, dtype))
        blocks = torch.randperm(num_blocks)[: len(requests) * width]
        self.block_table = blocks.view(len(requests), width).int()
        self.keys, self.values = [], []
        written = []
        for i, request in enumerate(requests):
            shape = (request.seq_len, num_kv_heads, head_size)
            key, value = torch.randn(2, *shape).to(dtype)
            if i in (shared or {}):
                other, count = shared[i]
                self.block_table[i, :count] = self.block_table[other, :count]
                for mine, theirs in zip((key, value), written[other], strict=True):
                    mine[: count * block_size] = theirs[: count * block_size]
            written.append((key, value))
            self.write(i, key, value)
            self.keys.append(self.stored(key, self.k_scale))
            self.values.append(self.stored(value, self.v_scale))
        counts = torch.tensor([0, *(len(r.rows) for r in requests)])
        self.query_start_loc = counts.cumsum(0).int()
        self.seq_lens = torch.tensor([r.seq_len for r in requests]).int()
        num_rows = int(self.query_start_loc[-1])
        num_heads = num_kv_heads * group
        # Strided like the query part of a fused QKV projection.
        fused = torch.randn(num_rows, num_heads + 2, head_size).to(dtype)
        self.query = fused[:, 1:-1]
        self.scale = head_size**-0.5

    def stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """What the cache makes of K or V: in fp8 vLLM rounds towards zero."""
        if self.cache_dtype not in FP8:
            return x
        fp8 = FP8[self.cache_dtype]
        x = x.float() / scale
        nearest = x.to(fp8)
        # The number before it, towards zero, where the nearest is further from zero.
        beyond = nearest.float().abs() > x.abs()
        return (nearest.view(torch.uint8) - beyond.byte()).view(fp8).float() * scale

    def write(self, i: int, key: torch.Tensor, value: torch.Tensor) -> None:
        positions = torch.arange(len(key))
        block_ids = self.block_table[i].long()[positions // self.block_size]
        slots = block_ids * self.block_size + positions % self.block_size
        num_blocks, num_heads, block_size, width = self.kv_cache.shape
        cache = self.raw_cache
        pages = cache.view(num_blocks, num_heads, 2 * block_size, width // 2)
        ops.cpu_attn_reshape_and_cache(
            *(key, value, *pages.chunk(2, 2), slots, self.isa),
            *(self.k_scale, self.v_scale, self.cache_dtype),
        )

    @property
    def raw_cache(self) -> torch.Tensor:
        """As vLLM hands it to layers."""
        if self.cache_dtype not in FP8:
            return self.kv_cache
        return self.kv_cache.view(torch.uint8)

    def tree_rows(self, num_words: int | None = None) -> TreeRows:
        requests = self.requests
        num_words = num_words or -(-max(len(r.parents) for r in requests) // 64)
        bits = torch.zeros(len(self.query), num_words, dtype=torch.int64)
        row = 0
        for request in requests:
            for node in request.rows:
                if request.is_tree:
                    for position in request.path(node)[request.context :]:
                        j = position - request.context
                        bits[row, j // 64] |= 1 << (j % 64) if j % 64 < 63 else -(2**63)
                row += 1
        return TreeRows(
            is_tree=torch.tensor([r.is_tree for r in requests]),
            context_lens=torch.tensor([r.context for r in requests]).int(),
            ancestor_bits=bits,
            all_tree=all(r.is_tree for r in requests),
        )

    def expected(
        self,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        window: int = 0,
    ):
        """[rows, H, D] float64: attention of each row over its path alone."""
        out = []
        for i, request in enumerate(self.requests):
            for row, node in enumerate(request.rows, int(self.query_start_loc[i])):
                path = request.path(node)[-window:]
                group = self.query.shape[1] // self.keys[i].shape[1]
                key = self.keys[i][path].double().repeat_interleave(group, 1)
                value = self.values[i][path].double().repeat_interleave(group, 1)
                q = self.query[row].double()
                scores = torch.einsum("hd,shd->hs", q, key) * self.scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], 1)
                weights = torch.softmax(scores, 1)[:, : len(path)]
                out.append(torch.einsum("hs,shd->hd", weights, value))
        return torch.stack(out)

    def run(
        self, kernel=tree_attention, softcap=0.0, sinks=None, num_words=None, window=0
    ):
        """[rows, H, D]: the kernel's output, NaN where it wrote nothing."""
        rows = self.tree_rows(num_words)
        out = torch.full_like(self.query, torch.nan)
        kernel(
            self.query,
            self.kv_cache,
            out,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            rows,
            self.scale,
            softcap,
            sinks,
            self.isa,
            self.k_scale,
            self.v_scale,
            window,
        )
        return out


def tiled_layout(block_size: int, head_size: int) -> PageLayout:
    """K [D, P] and V [P, D] in tiles of 16 columns, pairs of whose rows take turns."""

    def places(n: int, m: int) -> torch.Tensor:
        rows, columns = torch.arange(n)[:, None], torch.arange(m)
        tile = columns // 16 * 16 * n + rows // 2 * 32
        return tile + columns % 16 * 2 + rows % 2

    half = block_size * head_size
    key, value = places(head_size, block_size).T, places(block_size, head_size)
    return PageLayout(key, value + half, True, True)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    error = (out.double() - expected).abs().max().item()
    assert error < TOLERANCE[out.dtype], error
