"""CUDA graphs of an SSM's passes: one copy and one launch instead of dozens.

A graph runs so many requests with so many rows each, over buffers that every pass
fills. What is not needed is padding: requests without rows, rows whose K/V goes
nowhere. Levels that the host chooses and short catch-up passes are the same graph, as
the kernel of tree attention takes both; trees that grow on the device have graphs of
their own (`tree_graphs.py`). vLLM's speculator with a draft model has no graphs
(vllm/v1/worker/gpu/spec_decode/standalone_ar/speculator.py).

Dimension legend: R requests, F rows of all of them, W 64-bit words per bit row.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config import SchedulerConfig, VllmConfig
from vllm.distributed.parallel_state import (
    GraphCaptureContext,
    get_dp_group,
    get_pp_group,
    get_tp_group,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import current_stream
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_specinfer.device import StagedBuffers
from vllm_specinfer.drafting.output_head import MOST_ROWS

# What a pass gives: hidden states [F, H], and whatever else its model returns by row.
Outputs = tuple[torch.Tensor, ...]


class Captured(NamedTuple):
    """What a function launches, as a CUDA graph.

    Attributes:
        outputs: What each replay overwrites.
        graph: Launches it again.
        launch: The function; it holds the tensors that the graph only has addresses of.
    """

    outputs: Outputs
    graph: torch.cuda.CUDAGraph
    launch: Callable[[], Outputs]

    def replay(self) -> None:
        """Launch it again; the host does not wait."""
        self.graph.replay()


class PassRows(NamedTuple):
    """Rows of one forward pass, request by request.

    Attributes:
        slots: [R] int64 request slots.
        starts: [R + 1] int32 first row of each request.
        seq_lens: [R] int32 K/V positions of each request once its rows are written.
        tokens: [F] int32.
        positions: [F] int64.
        kv_slots: [F] int64, `PAD_SLOT_ID` for K/V that goes nowhere.
        is_tree: [R] whether a request's rows are nodes of a tree.
        context_lens: [R] int32 K/V positions before the first of such rows.
        ancestor_bits: [F, W] int64 what such rows see of each other.
    """

    slots: np.ndarray
    starts: np.ndarray
    seq_lens: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    kv_slots: np.ndarray
    is_tree: np.ndarray
    context_lens: np.ndarray
    ancestor_bits: np.ndarray

    @classmethod
    def chains(
        cls,
        slots: np.ndarray,
        starts: np.ndarray,
        seq_lens: np.ndarray,
        tokens: np.ndarray,
        positions: np.ndarray,
        kv_slots: np.ndarray,
    ) -> "PassRows":
        """Rows that follow each other; no tree."""
        return cls(
            *(slots, starts, seq_lens, tokens, positions, kv_slots),
            is_tree=np.zeros(len(slots), bool),
            context_lens=np.zeros(len(slots), np.int32),
            ancestor_bits=np.zeros((len(tokens), 1), np.int64),
        )

    @classmethod
    def level(cls, shape: "GraphShape") -> "PassRows":
        """Requests with all the rows of a level, which nobody sees yet."""
        starts = np.arange(shape.num_reqs + 1, dtype=np.int32) * shape.rows_per_req
        is_tree = np.ones(shape.num_reqs, bool)
        return cls.padding(shape)._replace(starts=starts, is_tree=is_tree)

    @classmethod
    def padding(cls, shape: "GraphShape") -> "PassRows":
        """Requests without rows."""
        num_reqs, num_rows = shape.num_reqs, shape.num_rows
        return cls(
            slots=np.zeros(num_reqs, np.int64),
            starts=np.zeros(num_reqs + 1, np.int32),
            seq_lens=np.zeros(num_reqs, np.int32),
            tokens=np.zeros(num_rows, np.int32),
            positions=np.zeros(num_rows, np.int64),
            kv_slots=np.full(num_rows, PAD_SLOT_ID, np.int64),
            is_tree=np.zeros(num_reqs, bool),
            context_lens=np.zeros(num_reqs, np.int32),
            ancestor_bits=np.zeros((num_rows, shape.words), np.int64),
        )

    def pieces(self, most: int) -> "list[PassRows]":
        """Passes of at most so many rows, one after the other."""
        num_rows = len(self.tokens)
        if num_rows <= most:
            return [self]
        return [
            self._rows(i, min(i + most, num_rows)) for i in range(0, num_rows, most)
        ]

    def _rows(self, begin: int, end: int) -> "PassRows":
        first = int(self.starts.searchsorted(begin, side="right")) - 1
        last = int(self.starts.searchsorted(end))
        requests, rows = slice(first, last), slice(begin, end)
        seq_lens = self.seq_lens[requests].copy()
        if not self.is_tree[last - 1]:  # K/V of the rest of a chain is not there yet
            seq_lens[-1] -= self.starts[last] - end
        return PassRows(
            self.slots[requests],
            self.starts[first : last + 1].clip(begin, end) - begin,
            seq_lens,
            self.tokens[rows],
            self.positions[rows],
            self.kv_slots[rows],
            self.is_tree[requests],
            self.context_lens[requests],
            self.ancestor_bits[rows],
        )

    def padded(self, shape: "GraphShape") -> "PassRows":
        """These rows first, then padding."""
        result = PassRows.padding(shape)
        for whole, part in zip(result, self, strict=True):
            whole[tuple(slice(size) for size in part.shape)] = part
        result.starts[len(self.starts) :] = self.starts[-1]
        return result


class GraphShape(NamedTuple):
    """The largest pass of a graph.

    Attributes:
        num_reqs: Requests (R).
        rows_per_req: Rows of each.
        words: 64-bit words per bit row (W).
    """

    num_reqs: int
    rows_per_req: int
    words: int

    @property
    def num_rows(self) -> int:
        """Rows of all requests (F)."""
        return self.num_reqs * self.rows_per_req


class StaticPass(NamedTuple):
    """A pass over tensors that stay where they are.

    Attributes:
        inputs: `rows`, for the host to fill in one copy.
        rows: On the device.
        states: [F, D] what rows read besides their tokens; None for nothing.
        launch: Runs it; the host does not wait.
    """

    inputs: StagedBuffers
    rows: PassRows
    states: torch.Tensor | None
    launch: Callable[[], Outputs]


class PassGraph(NamedTuple):
    """A captured pass.

    Attributes:
        shape: Its largest pass.
        fixed: What was captured; its inputs are filled before each replay.
        captured: Its launches.
    """

    shape: GraphShape
    fixed: StaticPass
    captured: Captured

    def run(self, rows: PassRows, states: torch.Tensor | None) -> Outputs:
        """What a pass over these rows gives, until the next one."""
        self.fixed.inputs.fill(*rows.padded(self.shape))
        num_rows = len(rows.tokens)
        if states is not None:
            self.fixed.states[:num_rows].copy_(states)
        self.captured.replay()
        return tuple(output[:num_rows] for output in self.captured.outputs)


class PassGraphs:
    """The captured passes of one SSM, by how many requests they take."""

    def __init__(
        self,
        most: GraphShape,
        capture: Callable[[GraphShape], PassGraph],
    ) -> None:
        """Capture for 1, 2, 4, ... requests and for as many as there may be.

        Args:
            most: The largest pass.
            capture: Captures one pass.
        """
        sizes = graph_sizes(most.num_reqs)
        self._graphs = [capture(most._replace(num_reqs=size)) for size in sizes]

    @property
    def outputs(self) -> Outputs:
        """Of the largest pass."""
        return self._graphs[0].captured.outputs

    def of(self, rows: PassRows) -> PassGraph | None:
        """The smallest graph that takes a pass; None where none does."""
        num_reqs, words = len(rows.slots), rows.ancestor_bits.shape[1]
        most_rows = np.diff(rows.starts).max(initial=0)
        for graph in reversed(self._graphs):
            shape = graph.shape
            if num_reqs <= shape.num_reqs:
                fits = most_rows <= shape.rows_per_req and words <= shape.words
                return graph if fits else None
        return None


def most_requests(scheduler: SchedulerConfig, most_nodes: int, most_rows: int) -> int:
    """Requests of the largest graphs; more of them draft without.

    Where so many run, few nodes pay.

    Args:
        scheduler: How many requests, and rows of a pass, there may be.
        most_nodes: Of a level of each.
        most_rows: Of each in any pass.
    """
    fit = scheduler.max_num_batched_tokens // most_rows
    return max(1, min(scheduler.max_num_seqs, MOST_ROWS // most_nodes, fit))


def graph_sizes(most: int) -> list[int]:
    """So many and the powers of two below; they fit into the largest's memory."""
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(1 << ((sizes[-1] - 1).bit_length() - 1))
    return sizes


def captured(
    launch: Callable[[], Outputs], device: torch.device, vllm_config: VllmConfig
) -> Captured:
    """What a function launches, as a CUDA graph.

    Args:
        launch: Works on the same tensors in each call; the host does not wait in it.
        device: Where it runs.
        vllm_config: The engine's.
    """
    graph, pool = torch.cuda.CUDAGraph(), current_platform.get_global_graph_pool()
    with _capturing(device):
        launch()  # what is compiled on first use is no part of the graph
        with (
            capture_pool(pool, vllm_config) as pool,
            torch.cuda.graph(graph, pool, stream=current_stream()),
        ):
            outputs = launch()
    return Captured(outputs, graph, launch)


@contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    """As vLLM's `graph_capture`, on one stream: graphs share no memory across streams.

    vllm/distributed/parallel_state.py: graph_capture, which makes a stream each time.
    """
    context = GraphCaptureContext(_capture_stream(device))
    with ExitStack() as stack:
        for group in (get_tp_group(), get_pp_group(), get_dp_group()):
            stack.enter_context(group.graph_capture(context))
        yield


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)
