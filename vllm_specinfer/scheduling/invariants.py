"""What must hold of blocks after every step; checked where VLLM_SPECINFER_DEBUG=1."""

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_specinfer.device import read

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.gpu.block_table import BlockTables

BlockIds = tuple[list[int], ...]


def check_blocks(scheduler: "Scheduler") -> None:
    """Every block is free or held, and every token of a text has one.

    Raises:
        RuntimeError: Something does not hold; the sentence says what.
    """
    pool = scheduler.kv_cache_manager.block_pool
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    holders: Counter[int] = Counter()
    for group in groups:
        for req_id, blocks in group.req_to_blocks.items():
            holders.update(block.block_id for block in blocks)
            request = scheduler.requests.get(req_id)
            _must(request is not None, "a block", "belong to a live request", req_id)
            slots = len(blocks) * group.block_size
            computed = request.num_computed_tokens
            _must(slots >= computed, f"{req_id}'s blocks", f"hold {computed}", slots)
            cached = group.num_cached_block.get(req_id, 0) * group.block_size
            _must(
                cached <= request.num_tokens,
                f"cached blocks of {req_id}",
                f"hold no more than its {request.num_tokens} tokens",
                cached,
            )
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    _must(
        len(free) == len(set(free)) == pool.get_num_free_blocks(),
        f"{len(free)} free blocks",
        f"be {pool.get_num_free_blocks()} different ones",
        free,
    )
    null = {block.block_id for block in pool.blocks if block.is_null}
    held = holders.keys() - null
    _must(not held & set(free), "free blocks", "not be held", held & set(free))
    lost = len(pool.blocks) - len(null) - len(held) - len(free)
    _must(lost == 0, "every block", "be free or held", f"{lost} that are neither")
    for block_id in held:
        block, count = pool.blocks[block_id], holders[block_id]
        _must(
            block.ref_cnt == count,
            f"block {block_id}",
            f"count its {count} holders",
            block.ref_cnt,
        )
        _must(
            count == 1 or block.block_hash is not None,
            f"block {block_id} of {count} requests",
            "be in the prefix cache",
            "one without a hash",
        )


def check_tables(
    tables: "BlockTables", slots: Mapping[str, int], expected: Mapping[str, BlockIds]
) -> None:
    """The worker's block tables are the scheduler's.

    Args:
        tables: The runner's.
        slots: Request slots by request id.
        expected: The scheduler's block ids per KV cache group, by request id.

    Raises:
        RuntimeError: They are not.
    """
    for req_id, per_group in expected.items():
        for group, block_ids in enumerate(per_group):
            count = int(tables.num_blocks.np[group, slots[req_id]])
            (row,) = read(tables.block_tables[group].gpu[slots[req_id], :count])
            found = row.tolist()
            _must(found == block_ids, f"{req_id}'s table", f"be {block_ids}", found)


def _must(holds: bool, what: str, wanted: str, got: object) -> None:
    if not holds:
        raise RuntimeError(f"{what} must {wanted}; got {got}")
