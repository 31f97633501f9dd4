"""Slots of trees are given up where vLLM would else preempt a request.

vLLM gives a request slots for its step's rows and `lookahead` more, in which SSMs draft
the next tree, and takes no block back from it, though most nodes are rejected. While
there are free blocks nothing is gained by that: the next tree wants them again. Where a
step lacks blocks, trees make do with the slots that the blocks have anyway, and blocks
that then hold no token of a text and no row of the step return to the pool.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu.block_table import BlockTables

# The slot of the token that a step adds to its accepted ones: SSMs read it before the
# target does.
LEAST_LOOKAHEAD = 1


class SlotsOfTrees:
    """What running requests hold beyond their texts.

    Attributes:
        most_of_one: Most rows of a request in the next step.
    """

    def __init__(
        self, manager: "KVCacheManager", max_model_len: int, max_num_tokens: int
    ) -> None:
        """Look at a manager; nothing is changed.

        Args:
            manager: vLLM's blocks of all requests.
            max_model_len: Most slots of a request.
            max_num_tokens: Most rows of a step.
        """
        self._pool = manager.block_pool
        self._groups = manager.coordinator.single_type_managers
        self._max_model_len = max_model_len
        self._max_num_tokens = self.most_of_one = max_num_tokens

    def missing(self, running: Sequence["Request"], lookahead: int) -> int:
        """Blocks that a step of these requests lacks; at most 0 where it lacks none.

        Args:
            running: The requests in vLLM's order.
            lookahead: Slots of each beyond its rows.
        """
        missing = -self._pool.get_num_free_blocks()
        for group in self._groups:
            # At most: all rows there can be, and a block begun by every request.
            slots = self._max_num_tokens + len(running) * (lookahead + group.block_size)
            missing += -(-slots // group.block_size)
        if missing <= 0:
            return missing
        missing = -self._pool.get_num_free_blocks()
        for group in self._groups:
            size, held = group.block_size, group.req_to_blocks
            left = self._max_num_tokens
            for request in running:
                num_computed, end = request.num_computed_tokens, _end_of_rows(request)
                end = min(end, num_computed + min(left, self.most_of_one))
                slots = min(end + lookahead, self._max_model_len)
                lacking = -(-slots // size) - len(held[request.request_id])
                if lacking > 0:
                    missing += lacking
                left -= end - num_computed
                if left <= 0:
                    break
        return missing

    def cut_drafts(
        self,
        running: Sequence["Request"],
        lookahead: int,
        num_blocks: int,
        num_kept: int | None,
    ) -> None:
        """Cut the trees of requests, the last ones first, until this saves so much.

        Whether a request has any tree must not depend on its draws, and so not on how
        many nodes it has: what is not tested would be drawn again. So cut all trees to
        a node before any is dropped.

        Args:
            running: The requests in vLLM's order.
            lookahead: As of `missing`.
            num_blocks: How many blocks to save: not to need, or to be given back.
            num_kept: Nodes that a tree keeps; None for those that fit into the blocks
                that the request has, one at least.
        """
        for request in reversed(running):
            if num_blocks <= 0:
                break
            before = self._lacking(request, lookahead)
            kept = self._fitting(request, lookahead) if num_kept is None else num_kept
            request.spec_token_ids = request.spec_token_ids[:kept]
            num_blocks -= before - self._lacking(request, lookahead)

    def _fitting(self, request: "Request", lookahead: int) -> int:
        """Nodes that need no further block, or one."""
        slots = min(
            len(group.req_to_blocks[request.request_id]) * group.block_size
            for group in self._groups
        )
        root_end = _end_of_rows(request) - len(request.spec_token_ids)
        return max(1, slots - root_end - lookahead)

    def _lacking(self, request: "Request", lookahead: int) -> int:
        """Blocks that a request needs beyond its own; those it could give back less."""
        slots = min(_end_of_rows(request) + lookahead, self._max_model_len)
        lacking = [
            -(-slots // group.block_size) - len(group.req_to_blocks[request.request_id])
            for group in self._groups
        ]
        if request.num_in_flight_tokens:
            return sum(max(0, of_group) for of_group in lacking)
        return sum(lacking)

    def give_back(
        self, running: Sequence["Request"], lookahead: int, num_blocks: int
    ) -> dict[str, list[int]]:
        """Free so many blocks, or all there are, that the next step does without.

        A request with rows in flight keeps its blocks: that step may write to them.

        Args:
            running: The requests.
            lookahead: Slots that each keeps beyond its rows.
            num_blocks: How many blocks to free.

        Returns:
            By request id how many blocks it has left, per KV cache group; of those that
            gave some back.
        """
        kept: dict[str, list[int]] = {}
        for request in running:
            if num_blocks <= 0:
                break
            if request.num_in_flight_tokens:
                continue
            slots = _end_of_rows(request) + lookahead
            held = [group.req_to_blocks[request.request_id] for group in self._groups]
            for group, blocks in zip(self._groups, held, strict=True):
                tail = blocks[-(-slots // group.block_size) :]
                if tail:
                    del blocks[-len(tail) :]
                    # The last one first, as vLLM does.
                    self._pool.free_blocks(reversed(tail))
                    num_blocks -= len(tail)
                    kept[request.request_id] = [len(of_group) for of_group in held]
        return kept


def _end_of_rows(request: "Request") -> int:
    """Slots of a request's text and its next step's rows."""
    return request.num_tokens_with_spec + request.num_output_placeholders


def shorten(
    tables: "BlockTables", slots: Mapping[str, int], kept: Mapping[str, list[int]]
) -> None:
    """Let a worker's block tables end where requests have given blocks back.

    Args:
        tables: The runner's.
        slots: Request slots by request id.
        kept: What `SlotsOfTrees.give_back` returns.
    """
    for req_id, num_blocks in kept.items():
        tables.num_blocks.np[:, slots[req_id]] = num_blocks
