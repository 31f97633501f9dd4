"""Random accepted paths, and what the Triton kernel makes of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

SEEDS = range(8)
BLOCKS_PER_REQUEST, MOST_NODES = 4, 40


def commit_case(seed: int, device: str = "cpu") -> tuple[list[torch.Tensor], dict]:
    """Caches of unequal layers, and the step's arguments.

    Requests have no tree, accept nothing, a chain that lies where it belongs, or a path
    with gaps; trees may straddle blocks.
    """
    rng = np.random.default_rng(seed)
    size = int(rng.choice([16, 32, 128]))  # of a block
    num_rows = np.array([1, 12, MOST_NODES + 1, *rng.integers(2, MOST_NODES + 2, 4)])
    num_blocks = len(num_rows) * BLOCKS_PER_REQUEST
    blocks = rng.permutation(num_blocks).reshape(len(num_rows), -1)
    slots, path = [], np.full((len(num_rows), MOST_NODES), 10**6, np.int32)
    count = np.zeros(len(num_rows), np.int32)
    for r, rows in enumerate(num_rows):
        positions = rng.integers(0, 4 * size - rows + 1) + np.arange(rows)
        slots.append(blocks[r, positions // size] * size + positions % size)
        if r != 1:  # which rejects everything
            rising = np.arange(1, rows)
            if r != 2:  # a chain
                rising = rising[rng.random(rows - 1) < 0.6]
            count[r] = len(rising)
            path[r, : count[r]] = rising
    random = torch.Generator().manual_seed(seed)
    caches = []
    for heads, head_size, dtype in (
        (3, 64, torch.bfloat16),
        (1, 80, torch.float32),
        (2, 256, torch.float16),
        (2, 32, torch.float8_e4m3fn),
    ):
        shape = (num_blocks, heads, size, 2 * head_size)
        tokens = torch.randn(*shape, generator=random).to(dtype)
        # Beside another layer's in one buffer, heads or positions first.
        order = (0, 2, 1, 3) if heads == 2 else (0, 1, 2, 3)
        stacked = torch.stack([tokens.permute(order)] * 2, dim=1).to(device)
        caches.append(stacked[:, 1].permute(order))
    first = np.concatenate([[0], np.cumsum(num_rows)[:-1]])
    arguments: dict[str, Any] = {
        "slot_mapping": np.concatenate(slots),
        "first": first,
        "path": path,
        "count": count,
    }
    return caches, {k: torch.from_numpy(v).to(device) for k, v in arguments.items()}


def run(caches: list[torch.Tensor], arguments: dict[str, Any]) -> None:
    """Commit with the kernel; the first layer is shared by two."""
    from vllm_specinfer.kernels.triton.commit import LayerTable, commit_paths

    table = LayerTable.of([*caches, caches[0].view(caches[0].shape)])
    commit_paths(table, **arguments)


def commit_paths_ref(
    kv_caches: Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    first: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> None:
    """`commit_paths` in plain torch; all rows are read before any is written."""
    src, dst = moved_slots(slot_mapping, first, path, count)
    for cache in {cache.data_ptr(): cache for cache in kv_caches}.values():
        size = cache.shape[2]
        moved = cache[src // size, :, src % size]
        cache[dst // size, :, dst % size] = moved


def moved_slots(
    slot_mapping: torch.Tensor,
    first: torch.Tensor,
    path: torch.Tensor,
    count: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] and [M] slots that accepted rows come from and go to."""
    depths = torch.arange(1, path.shape[1] + 1, device=path.device)
    accepted = depths <= count[:, None]
    sources = (first[:, None] + path)[accepted]
    targets = (first[:, None] + depths)[accepted]
    return slot_mapping[sources], slot_mapping[targets]


def outputs() -> list[list[torch.Tensor]]:
    """The caches after each case."""
    found = []
    for seed in SEEDS:
        caches, arguments = commit_case(seed)
        run(caches, arguments)
        found.append([cache.contiguous() for cache in caches])
    return found
