"""The KV commit on CPU: moved slots read back as the tokens that were moved."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from tests.attention.paged_batch import tiled_layout
from vllm_specinfer.commit import compaction
from vllm_specinfer.commit.compaction import CPUCommit, commit_kv_ref, mover
from vllm_specinfer.kernels.cpu import extension
from vllm_specinfer.kernels.cpu.page_layout import PageLayout, page_layout

current_platform.import_kernels()

NUM_BLOCKS = 5
FP8 = torch.uint8  # as vLLM keeps it
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
if torch.cpu._is_avx512_supported():  # vLLM's kernels want it
    DTYPES.append(FP8)


@dataclass
class Layer:
    """A cache tensor and the tokens vLLM's own operator wrote into it."""

    cache: torch.Tensor  # [B, Hkv, block_size, 2 * D]
    keys: torch.Tensor  # [slots, Hkv, D]
    values: torch.Tensor  # [slots, Hkv, D]

    @classmethod
    def make(cls, heads, head_size, dtype, block_size, cache=None) -> "Layer":
        shape = (NUM_BLOCKS, heads, block_size, 2 * head_size)
        cache = torch.zeros(shape, dtype=dtype) if cache is None else cache
        tokens = torch.randn(2, NUM_BLOCKS * block_size, heads, head_size)
        tokens = tokens.to(torch.bfloat16 if dtype is FP8 else dtype)
        layer = cls(cache, *tokens)
        layer.write(cache)
        return layer

    def write(self, cache: torch.Tensor) -> None:
        num_blocks, heads, block_size, width = cache.shape
        dtype = "fp8_e4m3" if cache.dtype is FP8 else "auto"
        pages = cache.view(num_blocks, heads, 2 * block_size, width // 2).chunk(2, 2)
        slots = torch.arange(num_blocks * block_size)
        ops.cpu_attn_reshape_and_cache(
            self.keys, self.values, *pages, slots, self.isa, kv_cache_dtype=dtype
        )

    @property
    def isa(self) -> str:
        """What vLLM would have its kernels run with."""
        dtype = torch.bfloat16 if self.cache.dtype is FP8 else self.cache.dtype
        return _get_attn_isa(dtype, self.cache.shape[2], self.cache.shape[3] // 2)

    def check_moved(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """The cache must be what writing the moved tokens afresh gives."""
        self.keys[dst], self.values[dst] = self.keys[src], self.values[src]
        fresh = torch.zeros_like(self.cache)
        self.write(fresh)
        assert torch.equal(self.cache, fresh)


def commit_kv(caches, src, dst, isas):
    mover(caches, isas)(src, dst)


MOVERS = [commit_kv, commit_kv_ref]


def random_moves(num_slots: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Moves whose sources and destinations overlap; a source may serve twice."""
    dst = torch.randperm(num_slots)[:count]
    src = torch.cat([dst.roll(1)[: count // 2], torch.randint(num_slots, (count,))])
    return src[:count], dst


@pytest.fixture(autouse=True, scope="module")
def built():
    assert extension.load() is not None, "these tests are about the C++ kernel"


@pytest.mark.parametrize("move", MOVERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_overlapping_moves_in_layers_of_unequal_shape(move, dtype, block_size):
    torch.manual_seed(block_size)
    shapes = [(3, 64), (3, 64), (2, 80 + 16 * (dtype is FP8)), (1, 128), (4, 32)]
    layers = [Layer.make(*shape, dtype, block_size) for shape in shapes]
    for count in (1, 7, 40):
        src, dst = random_moves(NUM_BLOCKS * block_size, count)
        isas = [layer.isa for layer in layers]
        move([layer.cache for layer in layers], src, dst, isas)
        for layer in layers:
            layer.check_moved(src, dst)


@pytest.mark.parametrize("move", MOVERS)
def test_a_path_slides_down_onto_its_own_nodes(move):
    """The usual commit: sources above destinations, each read before it is lost."""
    layer = Layer.make(2, 64, torch.bfloat16, 32)
    src, dst = torch.tensor([41, 42, 45, 63, 64]), torch.tensor([40, 41, 42, 43, 44])
    move([layer.cache], src, dst, [layer.isa])
    layer.check_moved(src, dst)


@pytest.mark.parametrize("move", MOVERS)
def test_a_tensor_shared_by_layers_moves_once(move):
    layer = Layer.make(2, 64, torch.float32, 32)
    src, dst = torch.tensor([3, 2, 1]), torch.tensor([2, 1, 3])
    caches = [layer.cache, layer.cache, layer.cache.view(layer.cache.shape)]
    move(caches, src, dst, 3 * [layer.isa])
    layer.check_moved(src, dst)


@pytest.mark.parametrize("move", MOVERS)
def test_layers_interleaved_in_one_buffer(move):
    raw = torch.zeros(NUM_BLOCKS, 3, 2, 32, 128)
    layers = [Layer.make(2, 64, torch.float32, 32, raw[:, i]) for i in range(3)]
    src, dst = random_moves(NUM_BLOCKS * 32, 30)
    move([layers[0].cache, layers[2].cache], src, dst, ["vec", "vec"])
    layers[0].check_moved(src, dst)
    layers[1].check_moved(dst, dst)
    layers[2].check_moved(src, dst)


@pytest.mark.parametrize("move", MOVERS)
def test_padding_and_moves_in_place_are_skipped(move):
    layer = Layer.make(2, 64, torch.float32, 32)
    src, dst = torch.tensor([-1, 5, 9, 7]), torch.tensor([6, -1, 9, 8])
    move([layer.cache], src, dst, [layer.isa])
    layer.check_moved(src[2:], dst[2:])


def test_rows_that_do_not_stand_where_they_belong_move_in_all_layers():
    layers = [Layer.make(2, 64, torch.float32, 32) for _ in range(2)]
    commit = CPUCommit([SimpleNamespace(kv_cache=x.cache, isa=x.isa) for x in layers])
    slots = torch.arange(40, 50)
    commit(slots, [0, 5], [[1], [1, 3, 4]])
    for layer in layers:
        layer.check_moved(torch.tensor([48, 49]), torch.tensor([47, 48]))
    commit(slots, [0], [[1, 2]])
    for layer in layers:
        layer.check_moved(slots[:0], slots[:0])


def test_nothing_to_move():
    layer = Layer.make(2, 64, torch.float32, 32)
    none = torch.zeros(0, dtype=torch.int64)
    commit_kv([layer.cache], none, none, ["vec"])
    layer.check_moved(none, none)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_moves_in_tiles(monkeypatch, dtype):
    """As vLLM's kernel for AMX has its pages, whether this machine has it or not."""
    tiles = tiled_layout(64, 96)
    monkeypatch.setattr(compaction, "page_layout", lambda *_: tiles)
    cache = torch.randint(0, 99, (NUM_BLOCKS, 3, 64, 192)).to(dtype)
    expected = cache.clone()
    src, dst = random_moves(NUM_BLOCKS * 64, 30)
    commit_kv_ref([expected], src, dst, ["amx"])
    assert not torch.equal(cache, expected)
    commit_kv([cache], src, dst, ["amx"])
    assert torch.equal(cache, expected)


def test_a_layout_other_than_plain_goes_through_index_tables(monkeypatch):
    """Pages that hold V before K, as no instruction set of this machine does."""
    layer = Layer.make(2, 64, torch.float32, 32)

    def swap(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).unflatten(2, (2, -1)).flip(2).reshape(x.shape)

    cache, plain = swap(layer.cache), page_layout("vec", torch.float32, 32, 64)
    half = 32 * 64
    swapped = PageLayout(plain.key + half, plain.value - half, False, False)
    src, dst = random_moves(NUM_BLOCKS * 32, 20)
    monkeypatch.setattr(compaction, "page_layout", lambda *_: swapped)
    commit_kv([cache], src, dst, ["vec"])
    monkeypatch.undo()
    layer.cache.copy_(swap(cache))
    layer.check_moved(src, dst)


def test_errors_name_the_value():
    layer = Layer.make(2, 64, torch.float32, 32)
    one = torch.tensor([1])
    wide = torch.zeros(NUM_BLOCKS, 2, 64, 128)
    with pytest.raises(ValueError, match="share a block size; got 32 and 64"):
        commit_kv([layer.cache, wide], one, one, ["vec", "vec"])
    with pytest.raises(RuntimeError, match="slots must be below 160; got 1 -> 160"):
        commit_kv([layer.cache], one, one + 159, ["vec"])
    layer.check_moved(one, one)
