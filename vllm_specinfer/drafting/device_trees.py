"""Trees of an SSM that grow on the device in CUDA graphs: one launch per level.

The host fills the inputs, launches as many levels as usually pay, and waits once, for
the candidates of all of them. Growing on the host (`NeuralSource`) it waits for each
level. Not yet run on a GPU.

Dimension legend: R requests, F nodes of a level per request, L levels below the root,
C candidates per request.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from vllm_specinfer.device import StagedBuffers, read_later
from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.drafting.graphs import GraphShape, PassRows, StaticPass, graph_sizes
from vllm_specinfer.drafting.growth import level_words
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.kernels.triton.coupled import coupled_children
from vllm_specinfer.options import Tree
from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.scheduling.levels import Levels
from vllm_specinfer.tree.candidates import Candidates


class TreeInputs(NamedTuple):
    """What the host knows of R requests before their trees grow.

    Attributes:
        slots: [R] int64 request slots.
        grows: [R] bool; the others are padding.
        context: [R] int64 rows of the SSM's K/V.
        capacity: [R] int64 scratch slots available.
        max_depth: [R] int64 deepest node whose K/V may be written.
        seeds: [R] int64.
        roots: [R] int64 positions of the roots.
        temperatures: [R] float32.
        top_k: [R] int64.
        top_p: [R] float32.
        min_p: [R] float32.
        correction: [2] float32 `Calibration.line`.
    """

    slots: np.ndarray
    grows: np.ndarray
    context: np.ndarray
    capacity: np.ndarray
    max_depth: np.ndarray
    seeds: np.ndarray
    roots: np.ndarray
    temperatures: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    correction: np.ndarray

    @classmethod
    def padding(cls, num_reqs: int) -> "TreeInputs":
        """Requests that do not grow."""
        types = [np.int64, bool, *[np.int64] * 5, np.float32, np.int64]
        types += [np.float32, np.float32]
        arrays = [np.zeros(num_reqs, kind) for kind in types]
        return cls(*arrays, np.zeros(2, np.float32))

    def padded(self, num_reqs: int) -> "TreeInputs":
        """These requests first, then padding; values of any type."""
        result = TreeInputs.padding(num_reqs)
        for whole, part in zip(result, self, strict=True):
            whole[: len(part)] = part
        return result


class DeviceTrees:
    """Graphs for 1, 2, 4, ... requests, each for greedy ones and for any."""

    def __init__(
        self, ssm: NeuralSSM, tree: Tree, num_nodes: int, num_candidates: int
    ) -> None:
        """Capture everything; the SSM's own passes must have been captured.

        Args:
            ssm: The SSM.
            tree: The shape of its trees.
            num_nodes: Nodes to keep per tree.
            num_candidates: So many of the likeliest tokens a draw is made from.
        """
        self._ssm = ssm
        self._num_nodes = num_nodes
        captured = [
            (
                size,
                [_Graphs(ssm, tree, num_nodes, size, m) for m in (1, num_candidates)],
            )
            for size in graph_sizes(ssm.max_num_reqs)
        ]
        # By the most requests, ascending: for greedy ones, for any.
        self._graphs = captured[::-1]
        growth = captured[0][1][0].growth
        self._levels = Levels(growth.sizes[1:], growth.ends)

    def grow(
        self,
        hidden: torch.Tensor,
        slots: np.ndarray,
        num_tokens: np.ndarray,
        roots: DraftRows,
        correction: tuple[float, float],
        worth: Worth,
    ) -> Callable[[], Candidates]:
        """Launch the growth of R trees.

        Args:
            hidden: [R, hidden] of the roots.
            slots: [R] request slots.
            num_tokens: [R] committed tokens, the root included.
            roots: The requests' parameters.
            correction: `Calibration.line`.
            worth: Of expanding nodes.

        Returns:
            Waits for the candidates.
        """
        ssm, num_reqs = self._ssm, len(slots)
        inputs = TreeInputs(
            slots=slots,
            grows=np.ones(num_reqs, bool),
            context=num_tokens - ssm.lookahead,
            capacity=ssm.capacity(slots, num_tokens),
            max_depth=ssm.max_model_len - num_tokens,
            seeds=roots.seeds,
            roots=roots.roots,
            temperatures=roots.temperatures,
            top_k=roots.top_k,
            top_p=roots.top_p,
            min_p=roots.min_p,
            correction=np.array(correction),
        )
        of_size = next(graphs for size, graphs in self._graphs if size >= num_reqs)
        graphs = of_size[int(roots.temperatures.any())]
        num_levels = self._levels.worth(worth, num_reqs, graphs.num_reqs)
        num_rows = sum(graphs.growth.sizes[1 : num_levels + 1])
        ssm.overwrite_scratch(slots, num_tokens, num_rows)
        graphs.run(inputs, hidden, num_levels)
        ssm.num_rows += graphs.num_reqs * num_rows
        ssm.num_levels += num_levels
        wait = graphs.candidates(num_reqs, num_levels)

        def found() -> Candidates:
            candidates = Candidates(*wait())
            self._levels.observe(candidates.scores)
            return candidates.cut(self._num_nodes)

        return found


class _Graphs:
    """The captured levels of so many requests.

    Attributes:
        num_reqs: How many.
        growth: Of their trees.
    """

    def __init__(
        self,
        ssm: NeuralSSM,
        tree: Tree,
        num_nodes: int,
        num_reqs: int,
        num_candidates: int,
    ) -> None:
        device = ssm.device
        self._ssm = ssm
        self.num_reqs = num_reqs
        self._num_candidates = num_candidates
        self.growth = DeviceGrowth(tree, num_nodes, num_reqs, device)
        sizes = self.growth.sizes
        padding = TreeInputs.padding(num_reqs)
        self._buffers = StagedBuffers(device, *padding)
        self._inputs = TreeInputs(*self._buffers.tensors)
        self._requests = torch.arange(num_reqs, device=device)[:, None]
        self._hidden = ssm.no_hidden(num_reqs)
        # By depth what a head's next level reads of the nodes; None for an SSM.
        self._own = [ssm.no_states(num_reqs * size) for size in sizes]
        words = level_words(tree, num_nodes)
        self._passes: dict[int, StaticPass] = {}
        for size in sizes[1:]:
            shape = GraphShape(num_reqs, size, words)
            if size not in self._passes:
                self._passes[size] = ssm.static_pass(shape, PassRows.level(shape))
        launches: list[Callable[[], tuple]] = [self._start]
        for depth in range(1, len(sizes)):
            launches.append(lambda depth=depth: self._expand(depth))
        self._replays = [ssm.captured(launch)[1] for launch in launches]

    def run(self, inputs: TreeInputs, hidden: torch.Tensor, num_levels: int) -> None:
        """Launch the children of the roots [R, hidden] and so many levels."""
        self._buffers.fill(*inputs.padded(self.num_reqs))
        self._hidden[: len(hidden)].copy_(hidden)
        if self._own[0] is not None:
            self._own[0][: len(hidden)].copy_(self._ssm.own_states)
        for replay in self._replays[: num_levels + 1]:
            replay()

    def candidates(
        self, num_reqs: int, num_levels: int
    ) -> Callable[[], tuple[np.ndarray, ...]]:
        """Tokens, parents and scores of so many levels, when they are there."""
        growth = self.growth
        found = slice(0, num_reqs), slice(0, growth.ends[num_levels])
        return read_later(
            growth.tokens[found], growth.parents[found], growth.scores[found]
        )

    def _start(self) -> tuple:
        self.growth.start(self._inputs.grows)
        return self._extend(0, self._hidden)

    def _extend(self, depth: int, hidden: torch.Tensor) -> tuple:
        """Children of the nodes at a depth, given their hidden states [R * F, H]."""
        inputs, k = self._inputs, self.growth.num_children[depth]
        scores, children = coupled_children(
            *self._ssm.likeliest_on_device(hidden, max(k, self._num_candidates)),
            *(inputs.seeds, inputs.roots, inputs.temperatures),
            *(inputs.top_k, inputs.top_p, inputs.min_p),
            depth=depth,
            k=k,
        )
        factor, distrust = inputs.correction
        self.growth.extend(depth, scores * factor - distrust, children)
        return ()

    def _expand(self, depth: int) -> tuple:
        """Run the nodes of a depth that are expanded, and add their children."""
        inputs, ssm, sizes = self._inputs, self._ssm, self.growth.sizes
        level = self.growth.advance(depth, inputs.capacity, inputs.max_depth)
        run, context = self._passes[sizes[depth]], inputs.context[:, None]
        tokens = self.growth.tokens.gather(1, level.columns)
        flat = context + level.scratch.clamp_min(0)
        kv_slots = ssm.kv_slots_on_device(inputs.slots, flat)
        rows = run.rows
        rows.slots.copy_(inputs.slots)
        rows.seq_lens.copy_(inputs.context + level.used)
        rows.tokens.copy_(torch.where(level.is_node, tokens, 0).flatten())
        # A node's position id is its depth, not its scratch slot.
        positions = (context - 1 + depth).clamp_max(ssm.max_model_len - 1)
        rows.positions.view(level.columns.shape).copy_(positions.expand_as(tokens))
        rows.kv_slots.copy_(torch.where(level.is_node, kv_slots, PAD_SLOT_ID).flatten())
        rows.context_lens.copy_(inputs.context)
        rows.ancestor_bits.copy_(level.bits.flatten(0, 1))
        if run.states is not None:
            above = self._requests * sizes[depth - 1] + level.parents
            run.states.copy_(self._own[depth - 1][above.flatten()])
        hidden, *own = run.launch()
        if run.states is not None:
            self._own[depth].copy_(own[0])
        return self._extend(depth, hidden)
