"""The trees of one step that are drafted ahead of the host, and for whom.

Dimension legend: B requests of the batch, R of them get a tree, P are inside their
prompts, N nodes per request.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_specinfer.device import Once
from vllm_specinfer.drafting.ahead import Found
from vllm_specinfer.drafting.experience import first_source
from vllm_specinfer.scheduling.step_stats import NO_CANDIDATES, WorkerStats


class Roles(NamedTuple):
    """What the requests of a batch do next.

    Attributes:
        growing: [R] batch indices of those that get a tree.
        slots: [R] their slots.
        req_ids: [R] their names.
        decoding: [D] slots of those that had left their prompts before.
        reading: [P] batch indices of the others.
        prompts: [P] their slots.
        ends: [P] tokens of the prompts that have K/V now.
        ended: [P] whether that is all.
    """

    growing: np.ndarray
    slots: np.ndarray
    req_ids: list[str]
    decoding: np.ndarray
    reading: np.ndarray
    prompts: np.ndarray
    ends: np.ndarray
    ended: np.ndarray

    @classmethod
    def of(cls, batch: InputBatch) -> "Roles":
        """The host knows them, whatever the step brings."""
        slots, in_prompt = batch.idx_mapping_np, batch.is_prefilling_np
        ends = batch.num_computed_prefill_tokens_np + batch.num_scheduled_tokens
        grows = ~in_prompt | (ends >= batch.prefill_len_np)
        growing = np.flatnonzero(grows)
        return cls(
            growing=growing,
            slots=slots[growing],
            req_ids=[batch.req_ids[i] for i in growing],
            decoding=slots[~in_prompt],
            reading=np.flatnonzero(in_prompt),
            prompts=slots[in_prompt],
            ends=ends[in_prompt].astype(np.int64),
            ended=grows[in_prompt],
        )


class AheadTrees:
    """The trees of a step, which whoever asks waits for, on any thread.

    Attributes:
        found: Waits for what has been drafted.
        slots: [R] for whom.
        sizes: [R] nodes of each tree that have rows.
    """

    def __init__(
        self, found: Callable[[], Found], roles: Roles, sizes: np.ndarray
    ) -> None:
        """Wait for nothing yet.

        Args:
            found: Waits for what has been drafted.
            roles: For whom.
            sizes: [R] nodes of each tree that have rows.
        """
        self.found = Once(found)
        self.slots, self.sizes = roles.slots, sizes
        self._req_ids = roles.req_ids
        self._places = {slot: i for i, slot in enumerate(roles.slots.tolist())}

    @functools.cached_property
    def _sources(self) -> list[list[int]]:
        """[R, N] the first source of each node."""
        return first_source(self.found().given).tolist()

    @functools.cached_property
    def _num_nodes(self) -> list[int]:
        """[R] nodes of each tree."""
        return self.found().is_node.sum(axis=1).tolist()

    def sources_of_nodes(self) -> Callable[[int, list[int]], list[int]]:
        """As `Experience.sources_of_nodes`."""

        def sources_of(slot: int, nodes: list[int]) -> list[int]:
            of_tree = self._sources[self._places[slot]]
            return [of_tree[node] for node in nodes]

        return sources_of

    def num_nodes(self, slot: int) -> int:
        """Of the tree of a slot."""
        return self._num_nodes[self._places[slot]]

    def parents(self) -> dict[str, list[int]]:
        """Of the nodes that have rows, by request; `NO_NODE` behind the last one."""
        rows = zip(self._req_ids, self.found().parents, self.sizes, strict=True)
        return {req_id: parents[:size].tolist() for req_id, parents, size in rows}

    @property
    def has_row(self) -> np.ndarray:
        """[R, N] bool; also of places that hold no node."""
        return np.arange(self.found().parents.shape[1]) < self.sizes[:, None]

    def count(self, names: Sequence[str], stats: WorkerStats) -> None:
        """Nodes by source, and who has none."""
        found = self.found()
        first = first_source(found.given)[found.is_node & self.has_row]
        counts = np.bincount(first).tolist()
        stats.drafted.update(dict(zip(names, counts, strict=False)))
        empty = np.flatnonzero((self.sizes > 0) & ~found.is_node.any(axis=1)).tolist()
        stats.reasons |= {self._req_ids[i]: NO_CANDIDATES for i in empty}
