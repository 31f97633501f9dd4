"""How tree attention is cut into programs and tiles; nothing of it is measured."""

from functools import cache

import torch
import triton

PROGRAMS_PER_SM = 2


def choose_num_programs(num_kv_heads: int, device: torch.device) -> int:
    """Programs of each of so many KV heads that fill the device."""
    return max(1, PROGRAMS_PER_SM * _num_sms(device) // num_kv_heads)


def rows_per_block(
    max_query_len: int, group: int, head_size: int, element_size: int
) -> int:
    """Rows of a block where a request has up to so many.

    Args:
        max_query_len: As of `tree_attention`.
        group: Query heads of a KV head.
        head_size: D.
        element_size: Bytes of a query's element.
    """
    padded = triton.next_power_of_2(head_size)
    return tile_shape(max_query_len * group, group, padded, element_size)[0] // group


def num_stages(head_padded: int, element_size: int) -> int:
    """Tiles of K and V under way: of large heads there is room for fewer."""
    return 2 if head_padded > 128 and element_size <= 2 else 3


def tile_shape(
    num_lanes: int, group: int, head_padded: int, element_size: int
) -> tuple[int, int]:
    """Rows times query heads and KV positions of a program's step.

    They keep within the shared memory of an Ada GPU (99 KiB) without many spills.
    """
    if element_size <= 2:
        most_lanes, tile = (128, 64) if head_padded <= 128 else (64, 32)
    else:
        most_lanes, tile = (32, 32) if head_padded <= 128 else (16, 16)
    lanes = min(triton.next_power_of_2(num_lanes), most_lanes)
    lanes = max(16, lanes, triton.next_power_of_2(group))
    # So many query heads share a KV head that a row alone takes more lanes.
    return lanes, tile if lanes <= most_lanes else max(16, tile // 2)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count
