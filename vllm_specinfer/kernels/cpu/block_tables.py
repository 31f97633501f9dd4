"""Block tables and slot mappings of every KV cache group.

vLLM hands these kernels tables of raw addresses, one int32 block table per group.
Each function takes the arguments of the kernel of the same name, in its order.

G KV cache groups, R requests of the step, M request rows, T flat tokens.
"""

import ctypes

import numpy as np
import torch

from vllm_specinfer.kernels.cpu.inputs import INT32_BYTES


def gather_block_tables(
    idx_mapping: torch.Tensor,  # [R]
    src_block_table_ptrs: torch.Tensor,  # [G] addresses of [M, stride]
    dst_block_table_ptrs: torch.Tensor,  # [G] addresses of [padded R, stride]
    block_table_strides: torch.Tensor,  # [G]
    num_blocks: torch.Tensor,  # [G, M]
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens: torch.Tensor | None = None,  # [M], from vLLM 0.33 on
    sliding_window_reach: torch.Tensor | None = None,  # [G], as well
    block_sizes: torch.Tensor | None = None,  # [G], as well
    MASK_SLIDING_WINDOW: bool = False,
    **_: object,
) -> None:
    """Copy the step's rows to the front of the input tables.

    With ``MASK_SLIDING_WINDOW`` blocks that no row of the step can see any more are
    replaced by block 0: they may be another request's by now.

    The dispatcher drops the launch grid, which alone tells how many padded rows to
    zero. Only CUDA graphs pad the batch, so on CPU there are none.
    """
    requests = idx_mapping.tolist()
    sources = src_block_table_ptrs.tolist()
    targets = dst_block_table_ptrs.tolist()
    counts = num_blocks.numpy()
    for group, stride in enumerate(block_table_strides.tolist()):
        row_bytes = stride * INT32_BYTES
        source, target = sources[group], targets[group]
        unseen = [0] * len(requests)
        if MASK_SLIDING_WINDOW and (reach := int(sliding_window_reach[group])) > 0:
            before = num_computed_tokens.numpy()[requests] - reach
            unseen = (np.maximum(before, 0) // int(block_sizes[group])).tolist()
        for request, count, num_unseen in zip(
            requests, counts[group, requests].tolist(), unseen, strict=True
        ):
            ctypes.memmove(target, source + request * row_bytes, count * INT32_BYTES)
            ctypes.memset(target, 0, min(num_unseen, count) * INT32_BYTES)
            target += row_bytes


def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,  # [R], -1 owns no blocks
    query_start_loc: torch.Tensor,  # [R + 1]
    pos: torch.Tensor,  # [T]
    block_table_ptrs: torch.Tensor,  # [G] addresses of [M, stride]
    block_table_strides: torch.Tensor,  # [G]
    block_sizes: torch.Tensor,  # [G]
    slot_mapping_enabled: torch.Tensor,  # [G]
    dcp_sharded: torch.Tensor,  # [G]
    slot_mappings: torch.Tensor,  # [G, max_num_tokens]
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    PAD_ID: int,
    **_: object,
) -> None:
    """The KV slot of every scheduled token; PAD_ID everywhere else."""
    if CP_SIZE != 1:
        raise ValueError(f"context parallel size must be 1 on CPU; got {CP_SIZE}")
    idx = idx_mapping.numpy()
    num_reqs = idx.shape[0]
    starts = query_start_loc.numpy()[: num_reqs + 1]
    begin, end = int(starts[0]), int(starts[-1])
    positions = pos.numpy()[begin:end]
    requests = idx.astype(np.int64)
    if end - begin != num_reqs or (np.diff(starts) != 1).any():
        requests = np.repeat(requests, np.diff(starts))
    padding = requests < 0
    any_padding = bool(padding.any())
    if any_padding:
        requests = np.where(padding, 0, requests)
    num_rows = int(requests.max(initial=0)) + 1

    slots = slot_mappings.numpy()
    addresses = block_table_ptrs.tolist()
    sizes = block_sizes.tolist()
    enabled = slot_mapping_enabled.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        row = slots[group]
        # Attention and later chunks may read past this step's tokens.
        row[end:max_num_tokens] = PAD_ID
        if not enabled[group]:
            row[begin:end] = PAD_ID
            continue
        blocks, offsets = np.divmod(positions, sizes[group])
        table = _int32_at(addresses[group], num_rows * stride)
        ids = table[requests * stride + blocks]
        row[begin:end] = ids * np.int64(sizes[group]) + offsets
        if any_padding:
            row[begin:end][padding] = PAD_ID


def _int32_at(address: int, count: int) -> np.ndarray:
    """A view of memory that a live tensor owns."""
    return np.frombuffer((ctypes.c_int32 * count).from_address(address), np.int32)
