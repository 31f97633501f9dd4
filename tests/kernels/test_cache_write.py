"""K and V of few rows: where vLLM's own operator writes them, or left to it."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from tests.attention.paged_batch import tiled_layout
from vllm_specinfer.attention.cpu import CPUTreeAttentionImpl
from vllm_specinfer.kernels.cpu import cache_write, extension
from vllm_specinfer.kernels.cpu.cache_write import MOST_ROWS, write_kv

current_platform.import_kernels()

NUM_BLOCKS, HEADS, HEAD_SIZE = 3, 2, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def built():
    assert extension.load() is not None, "these tests are about the C++ kernel"


def make(rows: int, dtype: torch.dtype, block_size: int = 32):
    """K and V as parts of one projection, a cache, slots in any order, its isa."""
    torch.manual_seed(rows)
    projected = torch.randn(rows, 5, HEADS, HEAD_SIZE).to(dtype)
    cache = torch.randn(NUM_BLOCKS, HEADS, block_size, 2 * HEAD_SIZE).to(dtype)
    slots = torch.randperm(NUM_BLOCKS * block_size)[:rows]
    isa = _get_attn_isa(dtype, block_size, HEAD_SIZE)
    return projected[:, 1], projected[:, 3], cache, slots, isa


def written_by_vllm(key, value, cache, slots, isa):
    cache = cache.clone()
    blocks, heads, block_size, width = cache.shape
    pages = cache.view(blocks, heads, 2 * block_size, width // 2).chunk(2, 2)
    ops.cpu_attn_reshape_and_cache(key, value, *pages, slots, isa)
    return cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_rows_lie_where_vllm_writes_them(dtype, block_size, rows):
    key, value, cache, slots, isa = make(rows, dtype, block_size)
    expected = written_by_vllm(key, value, cache, slots, isa)
    assert not torch.equal(cache, expected)
    assert write_kv(key, value, cache, slots, isa)
    assert torch.equal(cache, expected)


def test_padding_is_written_nowhere():
    key, value, cache, slots, isa = make(8, torch.float32)
    slots[[1, 4]] = -1
    real = slots >= 0
    expected = written_by_vllm(key[real], value[real], cache, slots[real], isa)
    assert write_kv(key, value, cache, slots, isa)
    assert torch.equal(cache, expected)


def test_rows_without_a_slot_are_not_written():
    key, value, cache, slots, isa = make(8, torch.float32)
    expected = written_by_vllm(key[:5], value[:5], cache, slots[:5], isa)
    assert write_kv(key, value, cache, slots[:5], isa)
    assert torch.equal(cache, expected)


def test_pages_in_tiles():
    key, value, cache, slots, _ = make(20, torch.bfloat16)
    layout = tiled_layout(32, HEAD_SIZE)
    expected = cache.clone()
    for row, slot in enumerate(slots.tolist()):
        pages = expected[slot // 32].view(HEADS, -1)
        pages[:, layout.key[slot % 32]] = key[row]
        pages[:, layout.value[slot % 32]] = value[row]
    extension.load().write_kv(key, value, cache, slots, True)
    assert torch.equal(cache, expected)


def test_what_is_left_to_vllm(monkeypatch):
    key, value, cache, slots, isa = make(MOST_ROWS + 1, torch.float32)
    before = cache.clone()
    assert not write_kv(key, value, cache, slots, isa)
    few = key[:4], value[:4]
    as_bytes = torch.zeros_like(cache, dtype=torch.uint8)
    assert not write_kv(*few, as_bytes, slots[:4], isa)
    monkeypatch.setattr(cache_write.extension, "load", lambda: None)
    assert not write_kv(*few, cache, slots[:4], isa)
    assert torch.equal(cache, before) and not as_bytes.any()


def test_a_slot_behind_the_cache_is_refused():
    key, value, cache, slots, isa = make(2, torch.float32)
    slots[1] = NUM_BLOCKS * 32
    with pytest.raises(RuntimeError, match="slots must be below 96; got 96"):
        write_kv(key, value, cache, slots, isa)


@pytest.mark.parametrize(("rows", "by_vllm"), [(3, False), (MOST_ROWS + 1, True)])
def test_a_layer_has_its_rows_written_once(monkeypatch, rows, by_vllm):
    stock = []
    monkeypatch.setattr(
        CPUAttentionBackendImpl,
        "do_kv_cache_update",
        lambda self, layer, *args: stock.append(args),
    )
    impl = CPUTreeAttentionImpl.__new__(CPUTreeAttentionImpl)
    key, value, cache, slots, isa = make(rows, torch.float32)
    before = cache.clone()
    impl.do_kv_cache_update(SimpleNamespace(isa=isa), key, value, cache, slots)
    assert len(stock) == by_vllm
    assert torch.equal(cache, before) == by_vllm
