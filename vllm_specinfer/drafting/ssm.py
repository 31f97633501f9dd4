"""A neural SSM: its forward passes over vLLM's paged KV cache.

Dimension legend: S request slots, B requests of the batch, R of them get a tree, F rows
of one pass, M likeliest tokens of a row, W 64-bit words per bit row.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.models.interfaces import supports_multimodal_embeddings
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.utils import AttentionGroup

from vllm_specinfer.device import StagedBuffers, is_host, read, stage
from vllm_specinfer.drafting.children import NUM_CANDIDATES
from vllm_specinfer.drafting.draft_kv import DraftKV
from vllm_specinfer.drafting.graphs import (
    Captured,
    GraphShape,
    Outputs,
    PassGraph,
    PassGraphs,
    PassRows,
    StaticPass,
    captured,
)
from vllm_specinfer.drafting.growth import Frontier
from vllm_specinfer.drafting.output_head import MOST_ROWS, DraftHead
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.tree.rows import TreeRows


class NeuralSSM:
    """One SSM with its attention layers.

    Attributes:
        head: Its output head.
        kv: What it has read, once it is bound.
        rows_per_step: So many it reads in the time of the target's largest step.
        layer_names: Its attention layers.
    """

    kv: DraftKV
    rows_per_step: int
    # Row r of a request reads token r + lookahead.
    lookahead = 0
    # Rows read states of the target beside their tokens.
    reads_states = False
    # [F, H] what children of the last pass's rows read of them; None for nothing.
    own_states: torch.Tensor | None = None

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
        self.device = device
        self.head = DraftHead(model, vllm_config.model_config)
        self._vllm_config = vllm_config
        self.max_model_len = vllm_config.model_config.max_model_len
        # Some that can see read nothing else.
        self._reads_embeddings = supports_multimodal_embeddings(model)
        # Placeholders of images may lie beyond the vocabulary.
        self._last_token = None
        if vllm_config.speculative_config.target_model_config.is_multimodal_model:
            self._last_token = vllm_config.model_config.get_vocab_size() - 1
        self.layer_names = layer_names
        # Rows of all forward passes since the start, and passes over levels of trees.
        self.num_rows = self.num_levels = 0
        self._scheduler_config = vllm_config.scheduler_config
        self._graphs: PassGraphs | None = None

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
            self.device,
            active_layer_names=self.layer_names,
        )
        used = [i for i, groups in enumerate(attn_groups) if groups]
        if len(used) != 1:
            raise ValueError(
                "the SSM's attention layers must share one KV cache group; got "
                f"{len(used)} groups"
            )
        self._groups = attn_groups[used[0]]
        self.kv = DraftKV(
            *(block_tables, used[0], kv_cache_config.num_blocks),
            *(self.max_model_len, self.lookahead),
        )
        return attn_groups

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self.kv.start(slot, request)

    def dummy_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """One pass without attention, for memory profiling and compilation."""
        states = self.no_states(len(input_ids))
        hidden = self._taken(self._run(input_ids, positions, None, None, states))
        # As many rows as a level may have where memory is profiled for it, and of each
        # as many tokens as draws are made from.
        rows = 1 if is_host(self.device) else MOST_ROWS
        self.head.likeliest(hidden[:rows], NUM_CANDIDATES)

    def skip(self, step: DraftStep) -> None:
        """The SSM is not asked in this step."""
        self.kv.fall_behind(step.slots)

    def catch_up(self, step: DraftStep) -> torch.Tensor:
        """Run every token the SSM has not seen, ragged over the batch.

        Returns:
            [R, hidden] hidden states of the growing requests' last tokens.
        """
        growing = step.growing
        num_rows = step.num_tokens - self.lookahead
        order, first = self.kv.unread(step.slots, num_rows)
        # Whoever wants a hidden state runs at least its last token.
        first[growing] = np.minimum(first[growing], num_rows[growing] - 1)
        counts = np.maximum(num_rows - first, 0)
        self.kv.keep_up(step.slots)
        part = order[counts[order] > 0]
        if not len(part):
            return torch.empty(0, 0)
        hidden = self._read(step, part, first[part], counts[part])
        ends = np.zeros(len(counts), np.int64)
        ends[part] = np.cumsum(counts[part])
        return self._last(hidden, stage(self.device, ends[growing] - 1)[0])

    def is_far_behind(self, step: DraftStep) -> bool:
        """Catching up would take longer than two steps of the target's prompts: all
        requests would wait for it."""
        most = 2 * self.rows_per_step
        if self.kv.num_unread(step.slots, step.num_tokens) <= most:
            return False  # so is nearly every step, and this is told quickly
        num_rows = step.num_tokens - self.lookahead
        _, first = self.kv.unread(step.slots, num_rows)
        return int(np.maximum(num_rows - first, 0).sum()) > most

    def read_some(self, step: DraftStep) -> None:
        """Run as many of the tokens it has not seen as one such step has time for."""
        num_rows = step.num_tokens - self.lookahead
        order, first = self.kv.unread(step.slots, num_rows)
        counts = np.maximum(num_rows - first, 0)[order]
        ends = np.minimum(np.cumsum(counts), self.rows_per_step)
        counts = np.diff(ends, prepend=0)
        part = order[counts > 0]
        self._read(step, part, first[part], counts[counts > 0])

    def _read(
        self, step: DraftStep, part: np.ndarray, first: np.ndarray, counts: np.ndarray
    ) -> torch.Tensor:
        """[F, hidden] of so many rows [r] from `first` [r] on, of requests [r]."""
        slots, starts = step.slots[part], np.zeros(len(part) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        positions = np.arange(starts[-1]) + np.repeat(first - starts[:-1], counts)
        row_slots = np.repeat(slots, counts)
        ends = first + counts
        rows = PassRows.chains(
            slots,
            starts,
            seq_lens=ends.astype(np.int32),
            tokens=step.all_token_ids[row_slots, positions + self.lookahead],
            positions=positions,
            kv_slots=self.kv.kv_slots(row_slots, positions),
        )
        hidden = self._run_rows(rows, self._states(slots, counts))
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            self.kv.has_read(slot, end + self.lookahead, step.all_token_ids[slot])
        return hidden

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
        rows = PassRows(
            slots,
            starts,
            seq_lens,
            tokens=frontier.tokens.astype(np.int32),
            # A node's position id is its depth, not its scratch slot.
            positions=num_rows[requests] - 1 + frontier.depth,
            kv_slots=self.kv.kv_slots(slots[requests], flat),
            is_tree=np.ones(len(slots), bool),
            context_lens=num_rows.astype(np.int32),
            ancestor_bits=frontier.ancestor_bits,
        )
        return self._run_rows(rows, self._states_of_parents(frontier))

    def likeliest(
        self, hidden: torch.Tensor, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Likeliest next tokens: float32 log-probabilities [F, M], int64 ids [F, M]."""
        return read(*self.head.likeliest(hidden, count))

    def capture(self, most: GraphShape) -> None:
        """Capture graphs of the passes that decoding needs, on CUDA.

        Args:
            most: The largest one.
        """
        self._graphs = PassGraphs(most, self._graph)

    def drop_graphs(self) -> None:
        """Forget them."""
        self._graphs = None

    def _graph(self, shape: GraphShape) -> PassGraph:
        fixed = self.static_pass(shape, PassRows.padding(shape))
        return PassGraph(shape, fixed, self.captured(fixed.launch))

    def captured(self, launch: Callable[[], Outputs]) -> Captured:
        """What is launched, as a graph (`graphs.captured`)."""
        return captured(launch, self.device, self._vllm_config)

    def static_pass(self, shape: GraphShape, rows: PassRows) -> StaticPass:
        """A pass that can be captured.

        Args:
            shape: The largest that it may be.
            rows: What it runs to begin with.
        """
        inputs = StagedBuffers(self.device, *rows)
        tensors, table = PassRows(*inputs.tensors), self.kv.blocks.rows(rows.slots)
        states = self.no_states(shape.num_rows)
        # What the kernels are launched for, whatever a pass brings.
        bounds = _host_side(
            np.arange(shape.num_reqs + 1, dtype=np.int32) * shape.rows_per_req,
            np.full(shape.num_reqs, self.max_model_len, np.int32),
        )
        run = self._prepared(tensors, table, bounds, states, in_tree=True)

        def launch() -> Outputs:
            self.kv.blocks.fill(table, tensors.slots)
            return run()

        return StaticPass(inputs, tensors, states, launch)

    def _run_rows(self, rows: PassRows, states: torch.Tensor | None) -> torch.Tensor:
        """[F, hidden] hidden states of rows, whose K/V is written."""
        self.num_rows += len(rows.tokens)
        pieces = rows.pieces(self._scheduler_config.max_num_batched_tokens)
        if len(pieces) == 1:
            return self._taken(self._run_piece(rows, states))
        outputs, begin = [], 0
        for piece in pieces:
            end = begin + len(piece.tokens)
            part = self._run_piece(piece, None if states is None else states[begin:end])
            # Graphs overwrite theirs.
            outputs.append([output.clone() for output in part])
            begin = end
        return self._taken(tuple(map(torch.cat, zip(*outputs, strict=True))))

    def _run_piece(self, rows: PassRows, states: torch.Tensor | None) -> Outputs:
        """A pass of no more rows than the model was compiled for."""
        graph = self._graphs and self._graphs.of(rows)
        if graph:
            return graph.run(rows, states)
        return self._prepared(
            PassRows(*stage(self.device, *rows)),
            self.kv.blocks.rows(rows.slots),
            _host_side(rows.starts, rows.seq_lens),
            states,
            bool(rows.is_tree.any()),
        )()

    def _prepared(
        self,
        rows: PassRows,
        block_table: torch.Tensor,
        bounds: dict[str, Any],
        states: torch.Tensor | None,
        in_tree: bool,
    ) -> Callable[[], Outputs]:
        """A pass of which nothing but the launches is left.

        Args:
            rows: On the device.
            block_table: [R, max_blocks] of its requests.
            bounds: As of `_host_side`.
            states: As of `_forward`.
            in_tree: Rows may be nodes of trees.
        """
        common = CommonAttentionMetadata(
            block_table_tensor=block_table,
            query_start_loc=rows.starts,
            seq_lens=rows.seq_lens,
            slot_mapping=rows.kv_slots,
            positions=rows.positions,
            **bounds,
        )
        tree = TreeRows(
            rows.is_tree, rows.context_lens, rows.ancestor_bits, all_tree=True
        )
        metadata: dict[str, object] = {}
        for group in self._groups:
            builder = group.get_metadata_builder()
            built = (
                builder.build_level(common, tree)
                if in_tree
                else builder.build(0, common)
            )
            metadata.update(dict.fromkeys(group.layer_names, built))
        return functools.partial(
            self._run, rows.tokens, rows.positions, metadata, rows.kv_slots, states
        )

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, object] | None,
        kv_slots: torch.Tensor | None,
        states: torch.Tensor | None,
    ) -> Outputs:
        slot_mapping = None
        if kv_slots is not None:
            slot_mapping = dict.fromkeys(self.layer_names, kv_slots)
        num_rows = input_ids.shape[0]
        if self._last_token is not None:
            input_ids = input_ids.clamp_max(self._last_token)
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
    ) -> Outputs:
        """The model's pass; an SSM has no use for states."""
        inputs = {"input_ids": input_ids, "positions": positions}
        if self._reads_embeddings:
            inputs["inputs_embeds"] = self.model.embed_input_ids(input_ids)
        hidden = self.model(**inputs)
        return hidden[:1] if isinstance(hidden, tuple) else (hidden,)

    def _taken(self, outputs: Outputs) -> torch.Tensor:
        """The hidden states of a pass."""
        return outputs[0]

    def _states(self, slots: np.ndarray, counts: np.ndarray) -> torch.Tensor | None:
        """What the rows of a catch-up pass read besides their tokens."""
        return None

    def no_states(self, num_rows: int) -> torch.Tensor | None:
        """Room for what rows [F] read besides their tokens; None for nothing."""
        return None

    def no_hidden(self, num_rows: int) -> torch.Tensor:
        """Room for the hidden states of rows [F], once passes are captured."""
        hidden = self._graphs.outputs[0]
        return hidden.new_zeros(num_rows, hidden.shape[1])

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
