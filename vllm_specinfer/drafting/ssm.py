"""A neural SSM: its forward passes over vLLM's paged KV cache.

Dimension legend: S request slots, B requests of the batch, R of them get a tree, F rows
of one pass, M likeliest tokens of a row, W 64-bit words per bit row.

The SSM's layers live in the target's block table. Its K/V of a request is valid for the
first `_num_caught_up` rows; a growing tree uses the slots after the last row as
scratch, which the next catch-up pass overwrites.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.utils import AttentionGroup

from vllm_specinfer.attention.metadata import TreeRows
from vllm_specinfer.device import read, stage
from vllm_specinfer.drafting.blocks import HostBlocks
from vllm_specinfer.drafting.growth import Frontier
from vllm_specinfer.drafting.head import DraftHead
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.written import WrittenBlocks


class NeuralSSM:
    """One SSM with its attention layers and K/V book-keeping.

    Row r of a request reads token r + `lookahead`; its K/V is in slot r.
    """

    lookahead = 0

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        layer_names: set[str],
        device: torch.device,
    ) -> None:
        """Wrap a loaded model; `bind` must follow before it drafts.

        Args:
            model: Any vLLM decoder with the target's vocabulary.
            vllm_config: The config to run forward passes under.
            layer_names: Its attention layers.
            device: The worker's device.
        """
        self.model = model
        self._device = device
        self._head = DraftHead(model, vllm_config.model_config)
        self._vllm_config = vllm_config
        self.max_model_len = vllm_config.model_config.max_model_len
        self._layer_names = layer_names
        # Rows of all forward passes since the start, and passes over levels of trees.
        self.num_rows = self.num_levels = 0
        self._scheduler_config = vllm_config.scheduler_config
        self._num_caught_up = np.zeros(self._scheduler_config.max_num_seqs, np.int64)

    def bind(
        self,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
    ) -> list[list[AttentionGroup]]:
        """Bind the model to the allocated KV cache; may be called again.

        Args:
            kv_cache_config: The engine's KV cache.
            block_tables: The runner's block tables.

        Returns:
            The SSM's attention groups, per KV cache group.

        Raises:
            ValueError: The SSM's layers are spread over several KV cache groups.
        """
        # With the SSM's own config: its builders need its head counts and dtype.
        attn_groups, _, _ = init_attn_backend(
            kv_cache_config,
            self._vllm_config,
            self._device,
            active_layer_names=self._layer_names,
        )
        used = [i for i, groups in enumerate(attn_groups) if groups]
        if len(used) != 1:
            raise ValueError(
                "the SSM's attention layers must share one KV cache group; got "
                f"{len(used)} groups"
            )
        self._groups = attn_groups[used[0]]
        self._group_id = used[0]
        self._input_blocks = block_tables.input_block_tables[used[0]]
        self._blocks = HostBlocks(block_tables, used[0])
        self._block_size = block_tables.block_sizes[used[0]]
        self._written = WrittenBlocks(
            kv_cache_config.num_blocks,
            self._block_size,
            self._scheduler_config.max_num_seqs,
        )
        return attn_groups

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; cached blocks may hold the SSM's K/V, too."""
        self.forget_blocks(slot)
        first, last = self.lookahead, request.num_computed_tokens + self.lookahead
        cached = request.prefill_token_ids[first:last]
        self._num_caught_up[slot] = self._written.start(
            slot, request.block_ids[self._group_id], cached
        )

    def forget_blocks(self, slot: int) -> None:
        """The slot's request does not hold the blocks any more that it held."""
        self._blocks.forget(slot)

    def capacity(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[R] scratch slots after the last row that the request owns."""
        held = self._blocks.held(slots) * self._block_size
        most = np.minimum(held, self.max_model_len)
        return most - num_tokens + self.lookahead

    def dummy_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """One pass without attention, for memory profiling and compilation."""
        states = self._dummy_states(len(input_ids))
        hidden = self._run(input_ids, positions, None, None, states)
        self._head.likeliest(hidden[:1], 1)

    def num_unread(self, step: DraftStep) -> int:
        """Known tokens of the batch that no pass has read yet."""
        num_rows = step.num_tokens - self.lookahead
        return int(np.maximum(num_rows - self._num_caught_up[step.slots], 0).sum())

    def skip(self, step: DraftStep) -> None:
        """The SSM is not asked in this step."""

    def catch_up(self, step: DraftStep) -> torch.Tensor:
        """Run every token the SSM has not seen, ragged over the batch.

        Returns:
            [R, hidden] hidden states of the growing requests' last tokens.
        """
        slots, growing = step.slots, step.growing
        num_rows = step.num_tokens - self.lookahead
        first = self._num_caught_up[slots]
        # Whoever wants a hidden state runs at least its last token.
        first[growing] = np.minimum(first[growing], num_rows[growing] - 1)
        counts = np.maximum(num_rows - first, 0)
        part = np.flatnonzero(counts)
        if not len(part):
            return torch.empty(0, 0)
        slots, first, counts = slots[part], first[part], counts[part]
        self._blocks.update(slots)
        starts = np.zeros(len(part) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        row_slots = np.repeat(slots, counts)
        tokens = step.all_token_ids[row_slots, positions + self.lookahead]
        kv_slots = self._kv_slots(row_slots, positions)
        seq_lens = num_rows[part].astype(np.int32)
        ids, at, cells, begins, lengths, batch_rows, last = stage(
            self._device,
            tokens,
            positions,
            kv_slots,
            starts,
            seq_lens,
            part,
            (starts[1:] - 1)[np.searchsorted(part, growing)],
        )
        common = CommonAttentionMetadata(
            block_table_tensor=self._input_blocks[batch_rows],
            query_start_loc=begins,
            seq_lens=lengths,
            slot_mapping=cells,
            positions=at,
            **_host_side(starts, seq_lens),
        )
        metadata = self._metadata(lambda builder: builder.build(0, common))
        self._written.overwrite(kv_slots[kv_slots != PAD_SLOT_ID])
        hidden = self._run(ids, at, metadata, cells, self._states(slots, counts))
        self._num_caught_up[slots] = num_rows[part]
        size = self._block_size
        for i in np.flatnonzero(first // size < num_rows[part] // size):
            slot = int(slots[i])
            known = step.all_token_ids[slot, self.lookahead : step.num_tokens[part[i]]]
            self._written.complete(slot, self._blocks.table[slot], known)
        return self._last(hidden, last)

    def run_level(
        self, frontier: Frontier, slots: np.ndarray, num_tokens: np.ndarray
    ) -> torch.Tensor:
        """Run one level of all growing trees with tree attention.

        Args:
            frontier: The nodes; `requests` index the two arrays below.
            slots: [R] request slots.
            num_tokens: [R] committed tokens, the root included.

        Returns:
            [F, hidden] hidden states.
        """
        self.num_levels += 1
        num_rows = num_tokens - self.lookahead
        requests = frontier.requests
        counts = np.bincount(requests, minlength=len(slots))
        starts = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        seq_lens = num_rows.astype(np.int32)
        flat = num_rows[requests] + frontier.scratch
        np.maximum.at(seq_lens, requests, flat.astype(np.int32) + 1)
        kv_slots = self._kv_slots(slots[requests], flat)
        ids, at, cells, begins, lengths, *tree = stage(
            self._device,
            frontier.tokens.astype(np.int32),
            # A node's position id is its depth, not its scratch slot.
            num_rows[requests] - 1 + frontier.depth,
            kv_slots,
            starts,
            seq_lens,
            np.ones(len(slots), bool),
            num_rows.astype(np.int32),
            frontier.ancestor_bits,
        )
        common = CommonAttentionMetadata(
            block_table_tensor=self._blocks.rows(slots),
            query_start_loc=begins,
            seq_lens=lengths,
            slot_mapping=cells,
            positions=at,
            **_host_side(starts, seq_lens),
        )
        rows = TreeRows(*tree, all_tree=True)
        metadata = self._metadata(lambda builder: builder.build_level(common, rows))
        self._written.overwrite(kv_slots[kv_slots != PAD_SLOT_ID])
        states = self._states_of_parents(frontier)
        return self._run(ids, at, metadata, cells, states)

    def likeliest(
        self, hidden: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest next tokens: float32 log-probabilities [F, M], int64 ids [F, M]."""
        return read(*self._head.likeliest(hidden, count))

    def _kv_slots(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV cache slots of flat positions; PAD where the request owns none."""
        size = self._block_size
        held = self._blocks.held(slots) * size
        inside = positions < np.minimum(held, self.max_model_len)
        safe = np.where(inside, positions, 0)
        blocks = self._blocks.table[slots, safe // size]
        kv_slots = blocks.astype(np.int64) * size + safe % size
        return np.where(inside, kv_slots, PAD_SLOT_ID)

    def _metadata(self, build: Callable[[Any], object]) -> dict[str, object]:
        """What each layer's builder makes of a pass, by layer."""
        metadata: dict[str, object] = {}
        for group in self._groups:
            built = build(group.get_metadata_builder())
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, object] | None,
        kv_slots: torch.Tensor | None,
        states: torch.Tensor | None,
    ) -> torch.Tensor:
        slot_mapping = None
        if kv_slots is not None:
            slot_mapping = dict.fromkeys(self._layer_names, kv_slots)
        num_rows = input_ids.shape[0]
        self.num_rows += num_rows
        with set_forward_context(
            metadata,
            self._vllm_config,
            num_tokens=num_rows,
            slot_mapping=slot_mapping,
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        ):
            return self._forward(input_ids, positions, states)

    def _forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        states: torch.Tensor | None,
    ) -> torch.Tensor:
        """The model's pass; an SSM has no use for states."""
        hidden = self.model(input_ids=input_ids, positions=positions)
        return hidden[0] if isinstance(hidden, tuple) else hidden

    def _states(self, slots: np.ndarray, counts: np.ndarray) -> torch.Tensor | None:
        """What the rows of a catch-up pass read besides their tokens."""
        return None

    def _dummy_states(self, num_rows: int) -> torch.Tensor | None:
        return None

    def _states_of_parents(self, frontier: Frontier) -> torch.Tensor | None:
        """What the nodes of a level read besides their tokens."""
        return None

    def _last(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Of a catch-up pass, the rows that trees grow from."""
        return hidden[rows]


def _host_side(starts: np.ndarray, seq_lens: np.ndarray) -> dict[str, Any]:
    """What attention metadata holds on the host, from a pass's starts [r + 1]."""
    return {
        "query_start_loc_cpu": torch.from_numpy(starts),
        "num_reqs": len(seq_lens),
        "num_actual_tokens": int(starts[-1]),
        "max_query_len": int(np.diff(starts).max()),
        "max_seq_len": int(seq_lens.max()),
    }
