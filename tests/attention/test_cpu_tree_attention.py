"""Tree attention on CPU against ordinary attention over each node's path.

Dimension legend: R requests, N rows of one request, H query heads, S KV positions,
D head size.
"""

import random
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_specinfer.attention import cpu
from vllm_specinfer.attention.reference import attend_rows
from vllm_specinfer.config import SpecInferConfig
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import PageLayout, page_layout
from vllm_specinfer.kernels.cpu.tree_attention import (
    tree_attention,
    tree_attention_ref,
)
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
# vLLM's kernels want head sizes that are multiples of 32 for them, as for tiles.
shapes_of_eight_bits = pytest.mark.parametrize(
    ("head_size", "num_kv_heads", "group", "block_size"),
    [(32, 1, 1, 32), (64, 3, 3, 128), (96, 2, 4, 64), (256, 1, 8, 32)],
)
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


KERNELS = [tree_attention, tree_attention_ref]


@pytest.fixture(autouse=True, scope="module")
def built():
    assert extension.load() is not None, "these tests are about the C++ kernel"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_size", "num_kv_heads", "group", "block_size"),
    [(32, 1, 1, 32), (64, 3, 3, 128), (80, 2, 4, 64), (112, 4, 1, 32), (256, 1, 8, 32)],
)
def test_a_row_equals_attention_over_its_path(
    kernel, dtype, head_size, num_kv_heads, group, block_size
):
    requests = [
        Request(context, random_parents(rows, seed=rows))
        for context, rows in ((131, 9), (5, 1), (64, 21), (0, 12), (300, 4))
    ]
    shape = (head_size, num_kv_heads, group, block_size)
    batch = Batch(requests, dtype, *shape)
    assert_close(batch.run(kernel), batch.expected())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHES)
@shapes_of_eight_bits
def test_an_fp8_cache_is_read_as_vllm_writes_it(
    kernel, dtype, cache_dtype, head_size, num_kv_heads, group, block_size
):
    requests = [
        Request(context, random_parents(rows, seed=rows))
        for context, rows in ((131, 9), (5, 1), (0, 12), (300, 4))
    ]
    shape = (head_size, num_kv_heads, group, block_size)
    batch = Batch(requests, dtype, *shape, cache_dtype=cache_dtype)
    softcap, sinks = 0.7, torch.linspace(-2, 6, num_kv_heads * group)
    assert_close(batch.run(kernel), batch.expected())
    assert_close(
        batch.run(kernel, softcap=softcap, sinks=sinks), batch.expected(softcap, sinks)
    )


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="AMX comes with AVX-512"
)
@pytest.mark.parametrize("cache_dtype", ["auto", *FP8])
@shapes_of_eight_bits
def test_pages_in_tiles_are_read_alike(
    cache_dtype, head_size, num_kv_heads, group, block_size, monkeypatch
):
    """As vLLM's kernel for AMX wants them, whether this machine has it or not."""
    requests = [
        Request(context, random_parents(rows, seed=rows))
        for context, rows in ((131, 9), (5, 1), (0, 12), (300, 4), (64, 33))
    ]
    shape = (head_size, num_kv_heads, group, block_size)
    batch = Batch(requests, DTYPES[1], *shape, cache_dtype=cache_dtype, isa="vec")
    expected = batch.run()
    assert_close(expected, batch.expected())
    rows = page_layout("vec", batch.kv_cache.dtype, block_size, head_size)
    tiles = tiled_layout(block_size, head_size)
    pages, items = batch.kv_cache.flatten(2), torch.stack([tiles.key, tiles.value])
    tiled = torch.empty_like(pages)
    tiled[:, :, items] = pages[:, :, torch.stack([rows.key, rows.value])]
    batch.kv_cache = tiled.view(batch.kv_cache.shape)
    monkeypatch.setattr(
        sys.modules[tree_attention.__module__], "page_layout", lambda *_: tiles
    )
    for kernel in KERNELS:
        assert_close(batch.run(kernel), batch.expected())
    assert cache_dtype == "auto" or torch.equal(batch.run(), expected)


@pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM probes a kernel for AMX"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_vllms_kernel_for_amx_has_pages_in_tiles(dtype):
    found, expected = page_layout("amx", dtype, 64, 96), tiled_layout(64, 96)
    assert found.is_known and found.in_tiles
    assert torch.equal(found.key, expected.key)
    assert torch.equal(found.value, expected.value)


@pytest.mark.parametrize("cache_dtype", CACHES)
def test_every_finite_fp8_number_is_read(cache_dtype):
    """As V of one position, which is then the output."""
    batch = Batch([Request(0, [-1])], head_size=256, cache_dtype=cache_dtype)
    numbers = torch.arange(256).byte().view(FP8[cache_dtype])
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 1.0)
    page = batch.kv_cache[batch.block_table[0, 0]].view(2, 64, 256)
    page[:, 32] = numbers.to(page.dtype)
    expected = (numbers * batch.v_scale).expand(1, 4, -1)
    assert torch.equal(batch.run(), expected)


@pytest.mark.parametrize("head_size", [96, 128, 160, 192, 224, 512])
def test_every_head_size_of_the_stock_kernel_runs(head_size):
    batch = Batch([Request(40, random_parents(11, 1))], head_size=head_size)
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_rows", [63, 64, 65, 130])
def test_trees_beyond_one_word(kernel, num_rows):
    batch = Batch([Request(100, random_parents(num_rows, seed=num_rows))])
    assert_close(batch.run(kernel), batch.expected())


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_one_short_tree_after_a_long_context_is_split_over_threads(num_kv_heads):
    """The kernel joins the splits of a context; sinks count once."""
    batch = Batch([Request(1500, random_parents(3, 1))], num_kv_heads=num_kv_heads)
    batch.scale *= 3  # unequal maxima of the splits
    sinks = torch.linspace(-2, 9, batch.query.shape[1])
    assert_close(batch.run(), batch.expected())
    assert_close(batch.run(sinks=sinks), batch.expected(sinks=sinks))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_requests_that_begin_with_the_same_blocks(dtype, softcap):
    requests = [
        Request(900, random_parents(7, 0)),
        Request(1100, chain(1)),
        Request(640, random_parents(9, 1)),
        Request(700, chain(5), is_tree=False),
        Request(901, random_parents(20, 2)),
        Request(650, chain(1)),
        Request(700, random_parents(30, 3)),
        # What it shares with the first one ends within its tree.
        Request(600, random_parents(12, 4)),
        Request(900, chain(2)),
        Request(40, chain(1)),
    ]
    shared = {2: (0, 20), 3: (0, 18), 4: (0, 28), 5: (1, 20), 6: (0, 9), 8: (4, 28)}
    shared |= {7: (0, 19), 9: (1, 1)}
    batch = Batch(requests, dtype, shared=shared)
    sinks = torch.randn(4)
    out = batch.run(softcap=softcap, sinks=sinks)
    expected = batch.expected(softcap, sinks)
    of_tree = [r.is_tree for r in requests for _ in r.rows]
    assert_close(out[of_tree], expected[of_tree])
    assert out[[not tree for tree in of_tree]].isnan().all()


@pytest.mark.parametrize("num_reqs", [2, 16, 40])
@pytest.mark.parametrize("num_rows", [1, 3, 50])
def test_shared_blocks_are_split_over_threads(num_reqs, num_rows):
    requests = [
        Request(600 + 7 * i, random_parents(num_rows, i)) for i in range(num_reqs)
    ]
    batch = Batch(requests, shared=dict.fromkeys(range(1, num_reqs), (0, 16)))
    assert_close(batch.run(), batch.expected())


@pytest.mark.parametrize("kernel", KERNELS)
def test_trees_after_thousands_of_tokens(kernel):
    """Of one request alone, whose context is split over threads, and of two."""
    for contexts in ([8150], [7900, 8170]):
        requests = [Request(n, random_parents(21, seed=n)) for n in contexts]
        batch = Batch(requests)
        assert_close(batch.run(kernel), batch.expected())


def test_words_beyond_the_tree_change_nothing():
    batch = Batch([Request(70, random_parents(20, 3))])
    assert torch.equal(batch.run(num_words=5), batch.run())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_drafting_level_sees_earlier_nodes_that_are_no_rows(kernel):
    requests = [
        Request(90, random_parents(33, 5), rows=list(range(25, 33))),
        Request(17, random_parents(12, 6), rows=[3, 7, 9]),
        Request(64, random_parents(80, 7), rows=[2, 66, 79]),
    ]
    batch = Batch(requests)
    assert_close(batch.run(kernel), batch.expected())


@pytest.mark.parametrize("kernel", KERNELS)
def test_softcap(kernel):
    batch = Batch([Request(77, random_parents(10, 8))])
    out = batch.run(kernel, softcap=0.5)
    assert_close(out, batch.expected(softcap=0.5))


@pytest.mark.parametrize("kernel", KERNELS)
def test_sinks(kernel):
    batch = Batch([Request(77, random_parents(10, 9))])
    sinks = torch.linspace(-2, 6, batch.query.shape[1])
    out = batch.run(kernel, sinks=sinks)
    assert_close(out, batch.expected(sinks=sinks))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [64, 65, 100, 1000])
def test_a_window_begins_in_the_context(kernel, dtype, window):
    requests = [
        Request(700, random_parents(12, 4)),
        Request(20, random_parents(7, 6)),
        Request(window - 1, chain(9)),
        Request(300, random_parents(60, 5), rows=[0, 30, 59]),
    ]
    batch = Batch(requests, dtype)
    assert_close(batch.run(kernel, window=window), batch.expected(window=window))


def test_requests_with_the_same_first_blocks_have_windows_of_their_own():
    requests = [Request(600, random_parents(8, seed)) for seed in range(3)]
    batch = Batch(requests, shared={1: (0, 16), 2: (0, 16)})
    assert_close(batch.run(window=130), batch.expected(window=130))


def test_a_window_that_could_end_among_the_nodes_is_refused():
    with pytest.raises(RuntimeError, match="window must be 0 or at least 128; got 127"):
        Batch([Request(300, chain(70))]).run(window=127)


@pytest.mark.parametrize("window", [0, 3, 40])
def test_the_definition_counts_a_window_along_the_path(window):
    requests = [
        Request(50, random_parents(8, 4)),
        Request(20, chain(12), is_tree=False),
        Request(0, random_parents(70, 5), rows=[30, 69]),
    ]
    batch = Batch(requests)
    out = torch.empty_like(batch.query)
    attend_rows(
        batch.query,
        lambda r, _: (batch.keys[r], batch.values[r]),
        out,
        batch.query_start_loc,
        batch.seq_lens,
        batch.tree_rows(),
        batch.scale,
        window=window,
        chains=True,
    )
    assert_close(out, batch.expected(window=window))


def test_large_scores_do_not_overflow():
    batch = Batch([Request(200, random_parents(12, 10))])
    batch.scale = 40.0
    error = (batch.run().double() - batch.expected()).abs().max()
    assert error < 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_of_other_requests_stay(kernel):
    requests = [
        Request(50, chain(6), is_tree=False),
        Request(40, random_parents(7, 11)),
        Request(30, chain(3), is_tree=False),
    ]
    out = Batch(requests).run(kernel)
    assert out[:6].isnan().all() and out[13:].isnan().all()
    assert not out[6:13].isnan().any()


def test_layers_may_share_one_raw_buffer():
    batch = Batch([Request(130, random_parents(9, 12))])
    expected = batch.run()
    wide = torch.full((len(batch.kv_cache), 3, *batch.kv_cache.shape[1:]), torch.nan)
    wide[:, 1] = batch.kv_cache
    batch.kv_cache = wide[:, 1]
    assert torch.equal(batch.run(), expected)


def test_a_layout_other_than_plain_goes_through_index_tables(monkeypatch):
    """Pages that hold V before K, as no instruction set of this machine does."""
    batch = Batch([Request(70, random_parents(8, 13))])
    _, _, block_size, width = batch.kv_cache.shape
    plain = page_layout(batch.isa, batch.kv_cache.dtype, block_size, width // 2)
    halves = batch.kv_cache.flatten(2).unflatten(2, (2, -1))
    batch.kv_cache = halves.flip(2).reshape(batch.kv_cache.shape)
    half = halves.shape[-1]
    swapped = PageLayout(plain.key + half, plain.value - half, False, False)
    monkeypatch.setattr(
        sys.modules[tree_attention.__module__], "page_layout", lambda *_: swapped
    )
    assert_close(batch.run(), batch.expected())


# The backend: metadata builder, implementation, registration.


def make_builder(batch: Batch, trees: bool) -> cpu.CPUTreeAttentionMetadataBuilder:
    _, num_kv_heads, block_size, width = batch.kv_cache.shape
    num_heads = batch.query.shape[1]
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=batch.query.dtype, get_num_attention_heads=lambda _: num_heads
        ),
        parallel_config=None,
        cache_config=SimpleNamespace(cache_dtype=batch.cache_dtype),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=SpecInferConfig.__new__(SpecInferConfig) if trees else None,
    )
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=width // 2,
        dtype=batch.raw_cache.dtype,
    )
    return cpu.CPUTreeAttentionMetadataBuilder(spec, [], config, torch.device("cpu"))


def make_impl(batch: Batch, monkeypatch, cls=cpu.CPUTreeAttentionImpl, **kwargs):
    model_config = SimpleNamespace(dtype=batch.query.dtype)
    monkeypatch.setattr(
        cpu_attn,
        "get_current_vllm_config",
        lambda: SimpleNamespace(model_config=model_config),
    )
    args = {
        "num_heads": batch.query.shape[1],
        "head_size": batch.query.shape[2],
        "scale": batch.scale,
        "num_kv_heads": batch.kv_cache.shape[1],
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": batch.cache_dtype,
    }
    return cls(**(args | kwargs))


def build(batch: Batch, tree: TreeRows | None, trees: bool = True):
    lens = batch.query_start_loc.diff()
    common = CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_reqs=len(lens),
        num_actual_tokens=len(batch.query),
        max_query_len=int(lens.max()),
        max_seq_len=int(batch.seq_lens.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=torch.zeros(len(batch.query), dtype=torch.int64),
    )
    return make_builder(batch, trees).build(0, common, tree=tree)


def forward(batch: Batch, impl, metadata) -> torch.Tensor:
    scales = {"_k_scale_float": batch.k_scale, "_v_scale_float": batch.v_scale}
    layer = SimpleNamespace(isa=batch.isa, **scales)
    out = torch.full(batch.query.shape, torch.nan, dtype=batch.query.dtype)
    query = batch.query.contiguous()
    impl.forward(layer, query, query, query, batch.raw_cache, metadata, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", ["auto", *CACHES])
def test_a_chain_equals_the_stock_kernel(dtype, cache_dtype, monkeypatch):
    requests = [Request(150, chain(9)), Request(33, chain(20))]
    batch = Batch(requests, dtype, unwritten=0, cache_dtype=cache_dtype)
    if batch.isa == "amx" and cache_dtype == "fp8_e4m3":
        pytest.skip("there vLLM's kernel is off by 0.02 and more; ours is compared")
    impl = make_impl(batch, monkeypatch)
    stock = forward(batch, impl, build(batch, None, trees=False))
    tree = forward(batch, impl, build(batch, batch.tree_rows()))
    assert_close(tree, stock.double())


@pytest.mark.parametrize("extra", [{}, {"logits_soft_cap": 0.7}, {"sinks": True}])
def test_a_mixed_batch_runs_both_kernels(extra, monkeypatch):
    requests = [
        Request(50, random_parents(8, 14)),
        Request(20, chain(40), is_tree=False),
        Request(100, random_parents(30, 15)),
        Request(64, chain(1), is_tree=False),
    ]
    batch = Batch(requests, torch.bfloat16, unwritten=0)
    if "sinks" in extra:
        extra = {"sinks": torch.linspace(-1, 4, 4).bfloat16()}
    out = forward(
        batch, make_impl(batch, monkeypatch, **extra), build(batch, batch.tree_rows())
    )
    expected = batch.expected(extra.get("logits_soft_cap", 0.0), extra.get("sinks"))
    assert_close(out, expected)


def test_the_stock_kernel_runs_nothing_before_the_first_prompt(monkeypatch):
    requests = [
        Request(50, random_parents(8, 14)),
        Request(64, chain(32), is_tree=False),
        Request(20, chain(40), is_tree=False),
        Request(0, chain(90), is_tree=False),
    ]
    batch = Batch(requests, unwritten=0)
    impl = make_impl(batch, monkeypatch)
    stock, num_rows = ops.cpu_attention_with_kv_cache, []

    def count(query, **kwargs):
        num_rows.append(len(query))
        stock(query, **kwargs)

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", count)
    for tree in (batch.tree_rows(), None):
        if tree is None:  # a step without drafts
            batch.requests[0].is_tree, batch.requests[0].parents = False, chain(8)
        out = forward(batch, impl, build(batch, tree))
        assert_close(out, batch.expected())
    assert num_rows == [130, 130]


def refuse_stock_kernel(monkeypatch) -> None:
    def refuse(*_args, **_kwargs):
        raise AssertionError("stock kernel called")

    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", refuse)
    monkeypatch.setattr(ops, "cpu_attn_get_scheduler_metadata", refuse)


@pytest.mark.parametrize(
    "others",
    [
        [Request(9, chain(2))],
        [Request(33, chain(1), is_tree=False), Request(0, chain(32), is_tree=False)],
    ],
)
def test_a_step_of_trees_and_chains_does_not_run_the_stock_kernel(others, monkeypatch):
    for size in (8, 70):
        requests = [others[0], Request(50, random_parents(size, 16)), *others[1:]]
        batch = Batch(requests)
        impl = make_impl(batch, monkeypatch)
        with monkeypatch.context() as patch:
            refuse_stock_kernel(patch)
            out = forward(batch, impl, build(batch, batch.tree_rows()))
        assert_close(out, batch.expected())


def test_a_step_of_chains_does_not_run_the_stock_kernel(monkeypatch):
    requests = [Request(n, chain(1 + n), is_tree=False) for n in (0, 31, 7)]
    batch = Batch(requests)
    impl = make_impl(batch, monkeypatch)
    refuse_stock_kernel(monkeypatch)
    assert_close(forward(batch, impl, build(batch, None)), batch.expected())


@pytest.mark.parametrize(("trees", "rows"), [(False, 8), (True, 33)])
def test_a_prompt_or_an_engine_without_trees_is_the_stock_step(
    trees, rows, monkeypatch
):
    batch = Batch([Request(50, chain(rows), is_tree=False)], unwritten=0)
    metadata = build(batch, None, trees)
    assert type(metadata) is cpu_attn.CPUAttentionMetadata
    stock = make_impl(batch, monkeypatch, cpu_attn.CPUAttentionBackendImpl)
    ours = make_impl(batch, monkeypatch)
    expected = forward(batch, stock, metadata)
    assert torch.equal(forward(batch, ours, metadata), expected)


def test_register_replaces_the_cpu_backend_and_may_run_twice():
    try:
        cpu.register()
        cpu.register()
        backend = AttentionBackendEnum.CPU_ATTN.get_class()
        assert backend is cpu.CPUTreeAttentionBackend
        assert backend.get_name() == "CPU_ATTN"
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [20, 33])
def test_what_one_node_makes_of_nan_stays_with_it(dtype, num_rows):
    """The tree begins behind a whole page and ends in half a tile."""
    request = Request(128 - num_rows + 4, [-1] + [0] * (num_rows - 1))
    batch = Batch([request], dtype, 64, 1, 1, block_size=128)
    batch.query[-1] = torch.nan
    is_nan = batch.run().isnan().flatten(1).any(1)
    assert is_nan.tolist() == (num_rows - 1) * [False] + [True]


def test_a_library_that_does_not_load_is_built_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path = extension._library()
    path.parent.mkdir()
    path.write_bytes(b"")

    def load(path):
        if not path.read_bytes():
            raise ImportError("file too short")
        return "kernels"

    monkeypatch.setattr(extension, "_build", lambda path: path.write_bytes(b"library"))
    monkeypatch.setattr(extension, "_import", load)
    extension.load.cache_clear()
    try:
        assert extension.load() == "kernels"
    finally:
        extension.load.cache_clear()


def test_without_a_compiler_the_kernel_is_plain_torch(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    extension.load.cache_clear()
    try:
        batch = Batch([Request(50, random_parents(8, 18))])
        assert_close(batch.run(), batch.expected())
        assert "plain torch" in caplog.text
    finally:
        extension.load.cache_clear()
