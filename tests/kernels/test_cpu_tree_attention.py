"""Tree attention on CPU against ordinary attention over each node's path."""

import sys
from dataclasses import replace

import pytest
import torch

from tests.attention.paged_batch import (
    CACHES,
    DTYPES,
    FP8,
    Batch,
    Request,
    assert_close,
    chain,
    random_parents,
    tiled_layout,
)
from vllm_specinfer.attention.reference import attend_rows
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import PageLayout, page_layout
from vllm_specinfer.kernels.cpu.tree_attention import (
    tree_attention,
    tree_attention_ref,
)

# vLLM's kernels want head sizes that are multiples of 32 for them, as for tiles.
shapes_of_eight_bits = pytest.mark.parametrize(
    ("head_size", "num_kv_heads", "group", "block_size"),
    [(32, 1, 1, 32), (64, 3, 3, 128), (96, 2, 4, 64), (256, 1, 8, 32)],
)
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
def test_every_fp8_number_is_read(cache_dtype):
    """As V of one position, which is then the output."""
    batch = Batch([Request(0, [-1])], head_size=256, cache_dtype=cache_dtype)
    numbers = torch.arange(256).byte().view(FP8[cache_dtype])
    # Infinity times a position's weight is no number in vLLM's kernel either.
    numbers = torch.where(numbers.float().isinf(), 1.0, numbers.float())
    page = batch.kv_cache[batch.block_table[0, 0]].view(2, 64, 256)
    page[:, 32] = numbers.to(page.dtype)
    expected = (numbers * batch.v_scale).expand(1, 4, -1)
    torch.testing.assert_close(batch.run(), expected, rtol=0, atol=0, equal_nan=True)


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


@pytest.mark.parametrize("context", range(64, 200, 9))
def test_blocks_before_a_window_may_hold_anything(context):
    """vLLM gives them to others."""
    batch = Batch([Request(context, chain(3))])
    expected = batch.expected(window=64)
    num_gone = max(0, context + 1 - 64) // batch.kv_cache.shape[2]
    batch.kv_cache[batch.block_table[0, :num_gone].long()] = torch.nan
    assert_close(batch.run(window=64), expected)


@pytest.mark.parametrize("wrong", ["bits", "blocks"])
def test_what_would_be_read_behind_a_tensor_is_refused(wrong):
    batch = Batch([Request(40, chain(3))])
    if wrong == "bits":
        tree = batch.tree_rows()
        cut = replace(tree, ancestor_bits=tree.ancestor_bits[:2])
        batch.tree_rows = lambda *args: cut
    else:
        batch.block_table = batch.block_table[:, :1]
    with pytest.raises(RuntimeError, match="a tree's rows must end before"):
        batch.run()


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [20, 33])
def test_what_one_node_makes_of_nan_stays_with_it(dtype, num_rows):
    """The tree begins behind a whole page and ends in half a tile."""
    request = Request(128 - num_rows + 4, [-1] + [0] * (num_rows - 1))
    batch = Batch([request], dtype, 64, 1, 1, block_size=128)
    batch.query[-1] = torch.nan
    is_nan = batch.run().isnan().flatten(1).any(1)
    assert is_nan.tolist() == (num_rows - 1) * [False] + [True]


@pytest.mark.parametrize("compiler", ["", "g++ -pthread"])
def test_a_compiler_may_have_arguments_or_be_the_usual_one(
    compiler, monkeypatch, tmp_path
):
    commands = []
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(extension, "_run", lambda *command: commands.append(command))
    with pytest.raises(FileNotFoundError):  # nothing has been compiled
        extension._build(tmp_path / "library.so")
    assert {command[0] for command in commands} == {"g++"}


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
