"""K/V commit on a GPU: accepted paths move to consecutive slots, all layers at once.

Dimension legend: L layers, R requests, N nodes per request, T flat rows of the step,
P positions per block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

WORD_BYTES = 4
BLOCK_WORDS = 1024


@dataclass(frozen=True)
class LayerTable:
    """Where the layers of one KV cache group keep their K/V, built once.

    Attributes:
        layers: [L, 6] int64 on the device: address, strides of blocks, heads and
            positions, heads, and length of a head's K and V; all but the first two
            counted in 32-bit words, which serve every type.
        block_size: P.
        most_words: Of one position of any layer.
    """

    layers: torch.Tensor
    block_size: int
    most_words: int

    @classmethod
    def of(cls, kv_caches: Sequence[torch.Tensor]) -> "LayerTable":
        """Describe caches [B, Hkv, P, 2 * D], at least one; a shared one moves once.

        Raises:
            ValueError: They have more than one P, or their K/V is not made of whole
                words.
        """
        sizes = {cache.shape[2] for cache in kv_caches}
        if len(sizes) > 1:
            raise ValueError(f"KV caches must share a block size; got {sorted(sizes)}")
        rows = []
        for address, cache in {c.data_ptr(): c for c in kv_caches}.items():
            lengths = (*cache.stride()[:3], cache.shape[3])
            num_bytes = [n * cache.element_size() for n in lengths]
            odd = [n for n in (address, *num_bytes) if n % WORD_BYTES]
            if odd or cache.stride(3) != 1:
                raise ValueError(
                    "K and V of a position must be consecutive 32-bit words; got "
                    f"shape {tuple(cache.shape)}, strides {cache.stride()} and type "
                    f"{cache.dtype}"
                )
            *strides, width = (n // WORD_BYTES for n in num_bytes)
            rows.append([address, *strides, cache.shape[1], width])
        layers = torch.tensor(rows, dtype=torch.int64, device=kv_caches[0].device)
        return cls(layers, sizes.pop(), max(row[4] * row[5] for row in rows))


@triton.jit
def _commit_paths_kernel(
    layers_ptr,
    slot_mapping_ptr,
    first_ptr,
    path_ptr,
    count_ptr,
    path_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    r = tl.program_id(0)
    layer_ptr = layers_ptr + tl.program_id(1) * 6
    cache_ptr = tl.load(layer_ptr).to(tl.pointer_type(tl.int32))
    stride_block = tl.load(layer_ptr + 1)
    stride_head = tl.load(layer_ptr + 2)
    stride_position = tl.load(layer_ptr + 3)
    num_heads = tl.load(layer_ptr + 4)
    width = tl.load(layer_ptr + 5)
    item = tl.program_id(2) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    inside = item < num_heads * width
    item_ptrs = cache_ptr + item // width * stride_head + item % width
    first = tl.load(first_ptr + r)
    # A path's rows rise, so row >= depth: a later move never reads what an earlier one
    # wrote. Each word of a position belongs to one lane of one program, which makes all
    # moves in order; so it has also read a slot before it overwrites it.
    for i in range(tl.load(count_ptr + r)):
        row = tl.load(path_ptr + r * path_stride + i)
        if row != i + 1:
            source = tl.load(slot_mapping_ptr + first + row)
            target = tl.load(slot_mapping_ptr + first + i + 1)
            words = tl.load(
                item_ptrs
                + source // BLOCK_SIZE * stride_block
                + source % BLOCK_SIZE * stride_position,
                mask=inside,
                other=0,
            )
            tl.store(
                item_ptrs
                + target // BLOCK_SIZE * stride_block
                + target % BLOCK_SIZE * stride_position,
                words,
                mask=inside,
            )


def commit_paths(
    table: LayerTable,
    slot_mapping: torch.Tensor,
    first: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """Move the K/V of accepted rows to the slots right after their root, in all layers.

    The host waits for nothing. Rows that stand where they belong are not touched.

    Args:
        table: The layers of one KV cache group.
        slot_mapping: [T] int64, the step's slots in that group.
        first: [R] flat row of each request's root.
        path: [R, N] int32 accepted rows within the request, from depth 1 down, rising;
            as `walk_trees` gives them.
        count: [R] int32 how many they are.
    """
    num_layers = len(table.layers)
    pieces = triton.cdiv(table.most_words, BLOCK_WORDS)
    if len(path):
        _commit_paths_kernel[(len(path), num_layers, pieces)](
            table.layers,
            slot_mapping,
            first,
            path,
            count,
            path.stride(0),
            BLOCK_SIZE=table.block_size,
            BLOCK_WORDS=BLOCK_WORDS,
        )
