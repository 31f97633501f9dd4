"""A neural SSM: its forward passes over vLLM's paged KV cache.

Dimension legend: S request slots, B requests of the batch, R of them get a tree, F rows
of one pass, M likeliest tokens of a row, W 64-bit words per bit row.

The SSM's layers live in the target's block table. Its K/V of a request is valid for the
first `_num_caught_up` rows; a growing tree uses the slots after the last row as
scratch, which the next catch-up pass overwrites.
"""

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

from vllm_specinfer.attention.cpu import TreeAttentionMetadata
from vllm_specinfer.attention.metadata import TreeRows
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
        self, model: nn.Module, vllm_config: VllmConfig, layer_names: set[str]
    ) -> None:
        """Wrap a loaded model; `bind` must follow before it drafts.

        Args:
            model: Any vLLM decoder with the target's vocabulary.
            vllm_config: The config to run forward passes under.
            layer_names: Its attention layers.
        """
        self.model = model
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
        device: torch.device,
    ) -> list[list[AttentionGroup]]:
        """Bind the model to the allocated KV cache; may be called again.

        Args:
            kv_cache_config: The engine's KV cache.
            block_tables: The runner's block tables.
            device: The worker's device.

        Returns:
            The SSM's attention groups, per KV cache group.

        Raises:
            ValueError: The SSM's layers are spread over several KV cache groups.
        """
        # With the SSM's own config: its builders need its head counts and dtype.
        attn_groups, _, _ = init_attn_backend(
            kv_cache_config,
            self._vllm_config,
            device,
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
        self._block_tables = block_tables
        self._block_size = block_tables.block_sizes[used[0]]
        self._written = WrittenBlocks(
            kv_cache_config.num_blocks,
            self._block_size,
            self._scheduler_config.max_num_seqs,
        )
        return attn_groups

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot; cached blocks may hold the SSM's K/V, too."""
        first, last = self.lookahead, request.num_computed_tokens + self.lookahead
        cached = request.prefill_token_ids[first:last]
        self._num_caught_up[slot] = self._written.start(
            slot, request.block_ids[self._group_id], cached
        )

    def capacity(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[R] scratch slots after the last row that the request owns."""
        held = self._block_tables.num_blocks.np[self._group_id, slots]
        most = np.minimum(held * self._block_size, self.max_model_len)
        return most - num_tokens + self.lookahead

    def dummy_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """One pass without attention, for memory profiling and compilation."""
        states = self._dummy_states(len(input_ids))
        hidden = self._run(input_ids, positions, None, None, states)
        self._head.likeliest(hidden[:1], 1)

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
        starts = np.zeros(len(part) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        row_slots = np.repeat(slots, counts)
        tokens = step.all_token_ids[row_slots, positions + self.lookahead]
        kv_slots = self._kv_slots(row_slots, positions)
        metadata = self._causal_metadata(
            part, starts, num_rows[part].astype(np.int32), positions, kv_slots
        )
        wanted = torch.from_numpy(starts[1:] - 1)[np.searchsorted(part, growing)]
        hidden = self._run(
            torch.from_numpy(tokens),
            torch.from_numpy(positions),
            metadata,
            kv_slots,
            self._states(slots, counts),
        )
        self._num_caught_up[slots] = num_rows[part]
        table = self._block_tables.block_tables[self._group_id].gpu.numpy()
        size = self._block_size
        for i in np.flatnonzero(first // size < num_rows[part] // size):
            slot = int(slots[i])
            known = step.all_token_ids[slot, self.lookahead : step.num_tokens[part[i]]]
            self._written.complete(slot, table[slot], known)
        return self._last(hidden, wanted)

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
        flat = num_rows[requests] + frontier.scratch
        used = np.zeros(len(slots), np.int32)
        np.maximum.at(used, requests, frontier.scratch.astype(np.int32) + 1)
        kv_slots = self._kv_slots(slots[requests], flat)
        context = torch.from_numpy(num_rows.astype(np.int32))
        seq_lens = context + torch.from_numpy(used)
        metadata = TreeAttentionMetadata(
            num_actual_tokens=len(requests),
            max_query_len=int(counts.max()),
            query_start_loc=torch.from_numpy(starts),
            max_seq_len=self.max_model_len,
            seq_lens=seq_lens,
            block_table=self._rows_of_block_table(slots),
            slot_mapping=torch.from_numpy(kv_slots),
            scheduler_metadata=None,
            tree=TreeRows(
                is_tree=torch.ones(len(slots), dtype=torch.bool),
                context_lens=context,
                ancestor_bits=torch.from_numpy(frontier.ancestor_bits),
                all_tree=True,
            ),
        )
        # A node's position id is its depth, not its scratch slot.
        positions = num_rows[requests] - 1 + frontier.depth
        return self._run(
            torch.from_numpy(frontier.tokens.astype(np.int32)),
            torch.from_numpy(positions),
            dict.fromkeys(self._layer_names, metadata),
            kv_slots,
            self._states_of_parents(frontier),
        )

    def likeliest(
        self, hidden: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest next tokens: float32 log-probabilities [F, M], int64 ids [F, M]."""
        values, tokens = self._head.likeliest(hidden, count)
        return values.numpy(), tokens.numpy()

    def _rows_of_block_table(self, slots: np.ndarray) -> torch.Tensor:
        return self._block_tables.block_tables[self._group_id].gpu[
            torch.from_numpy(slots)
        ]

    def _kv_slots(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """KV cache slots of flat positions; PAD where the request owns none."""
        size = self._block_size
        table = self._block_tables.block_tables[self._group_id].gpu.numpy()
        held = self._block_tables.num_blocks.np[self._group_id, slots] * size
        inside = positions < np.minimum(held, self.max_model_len)
        safe = np.where(inside, positions, 0)
        kv_slots = table[slots, safe // size].astype(np.int64) * size + safe % size
        return np.where(inside, kv_slots, PAD_SLOT_ID)

    def _causal_metadata(
        self,
        part: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        positions: np.ndarray,
        kv_slots: np.ndarray,
    ) -> dict[str, object]:
        """Metadata of an ordinary ragged causal pass, built by the stock builders."""
        tables = self._block_tables.input_block_tables[self._group_id]
        common = CommonAttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            max_seq_len=int(seq_lens.max()),
            num_reqs=len(part),
            num_actual_tokens=len(positions),
            max_query_len=int(np.diff(starts).max()),
            block_table_tensor=tables[torch.from_numpy(part)],
            slot_mapping=torch.from_numpy(kv_slots),
            positions=torch.from_numpy(positions),
        )
        metadata: dict[str, object] = {}
        for group in self._groups:
            built = group.get_metadata_builder().build(0, common)
            metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, object] | None,
        kv_slots: np.ndarray | None,
        states: torch.Tensor | None,
    ) -> torch.Tensor:
        slot_mapping = None
        if kv_slots is not None:
            slot_mapping = dict.fromkeys(self._layer_names, torch.from_numpy(kv_slots))
            self._written.overwrite(kv_slots[kv_slots != PAD_SLOT_ID])
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
