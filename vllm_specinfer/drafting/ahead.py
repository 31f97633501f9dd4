"""Drafting while the host does not know yet what the step before has brought.

The host decides from what earlier steps have cost and brought; how long the texts are,
what was accepted and which nodes are the likeliest is the device's business. What it
has found the host learns with the output of the step that verifies it.

Dimension legend: R requests, N nodes per request, Q sources, C candidates per request.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_specinfer.device import StagedBuffers, read_later
from vllm_specinfer.drafting.children import DraftRows
from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.drafting.graphs import Captured, captured, graph_sizes
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.sources import SourceSet
from vllm_specinfer.drafting.target_states import TargetStates
from vllm_specinfer.drafting.text_copies import Texts
from vllm_specinfer.drafting.tree_graphs import TreeGraphs, TreeInputs
from vllm_specinfer.kernels.triton.trees import best_trees
from vllm_specinfer.kernels.triton.union import Union
from vllm_specinfer.tree.device_draws import DrawBuffers, rows_of
from vllm_specinfer.tree.on_device import (
    DeviceCandidates,
    DeviceTree,
    TreeBuffers,
    cut,
)
from vllm_specinfer.tree.token_tree import NO_NODE


class Found(NamedTuple):
    """What the device has drafted for R requests.

    Attributes:
        lengths: [R] int32 tokens of the texts.
        parents: [R, N] int32, `NO_NODE` where there is none.
        scores: [R, N] float32.
        given: [R, Q, N] float32 scores by source.
        grown: [Q] of each source the scores [R, C] of all its candidates.
    """

    lengths: np.ndarray
    parents: np.ndarray
    scores: np.ndarray
    given: np.ndarray
    grown: tuple[np.ndarray, ...]

    @property
    def is_node(self) -> np.ndarray:
        """[R, N] bool."""
        return self.parents != NO_NODE


class AheadDrafter:
    """Drafts by SSMs and heads, by lookups, or by both.

    Attributes:
        max_num_reqs: Requests of the largest step that it asks SSMs for.
        buffers: Where the trees are.
    """

    def __init__(
        self,
        sources: SourceSet,
        num_nodes: int,
        texts: Texts,
        device: torch.device,
        max_num_reqs: int,
        vllm_config: VllmConfig,
        tests_draws: bool,
    ) -> None:
        """Capture what follows growth; the sources must have been captured.

        Args:
            sources: The sources.
            num_nodes: N.
            texts: Of all slots.
            device: The worker's device.
            max_num_reqs: Requests of the largest graphs of SSMs; lookups take all.
            vllm_config: The engine's.
            tests_draws: Verification wants to know what children were drawn from.
        """
        self._lookups, self._ssms = sources.lookups, sources.ssms
        self._texts = texts
        self._num_nodes, self._least = num_nodes, sources.least
        self.buffers = TreeBuffers(
            len(texts.lengths), num_nodes, sources.max_depth, device
        )
        self.max_num_reqs, self._vllm_config = max_num_reqs, vllm_config
        sizes = graph_sizes(max_num_reqs)
        # Beside lookups only the host knows what all draws were made from.
        if tests_draws and not self._lookups:
            self.buffers.draws = DrawBuffers(
                len(self.buffers.tokens),
                num_nodes,
                [graphs.draws for graphs in self._graphs(sizes[0], True)],
                self._ssms[0].chooser.replaces,
            )
        self._finishes = {
            (size, draws): self._captured(graphs[0].inputs, graphs)
            for size in (sizes if self._ssms else ())
            for draws in (False, True)
            for graphs in [self._graphs(size, draws)]
        }
        # By the most requests, ascending.
        self._look_ups: list[tuple[int, StagedBuffers, Captured]] = []
        of_lookups = graph_sizes(len(texts.lengths)) if self._lookups else []
        for size in of_lookups[::-1]:
            inputs = StagedBuffers(device, *TreeInputs.padding(size))
            look_up = self._captured(TreeInputs(*inputs.tensors), [])
            self._look_ups.append((size, inputs, look_up))

    def follows(self, slots: np.ndarray) -> bool:
        """Only the last step's tokens of these requests are new to the SSMs."""
        return all(source.ssm.kv.follows(slots) for source in self._ssms)

    def launch(
        self,
        slots: np.ndarray,
        num_new: torch.Tensor,
        roots: DraftRows,
        states: TargetStates | None,
    ) -> Callable[[], Found]:
        """Draft for R requests.

        Args:
            slots: [R] request slots.
            num_new: [R] tokens of their last step, on the device.
            roots: Their parameters.
            states: Of their last step, which heads read.

        Returns:
            Waits for what was found.
        """
        num_reqs, draws = len(slots), roots.sampled
        self._fill_lookups(slots)
        # Before anything is replayed: graphs may use the same memory.
        last = states and states.last(num_new, 1 + self.buffers.max_depth)
        levels = [source.follow(slots, num_new, roots, last) for source in self._ssms]
        graphs = self._graphs(num_reqs, draws)
        finish = self._finishes[graphs[0].num_reqs, draws]
        finish.replay()
        grown = [
            of_source.growth.scores[:num_reqs, : of_source.growth.ends[num_levels]]
            for of_source, num_levels in zip(graphs, levels, strict=True)
        ]
        return self._found(finish.outputs, num_reqs, grown)

    def look_up(self, slots: np.ndarray) -> Callable[[], Found]:
        """As `launch`, by lookups alone."""
        num_reqs = len(slots)
        self._fill_lookups(slots)
        size, inputs, look_up = next(
            of_size for of_size in self._look_ups if of_size[0] >= num_reqs
        )
        grows = np.ones(num_reqs, bool)
        known = TreeInputs.padding(num_reqs)._replace(slots=slots, grows=grows)
        inputs.fill(*known.padded(size))
        look_up.replay()
        return self._found(look_up.outputs, num_reqs, [])

    def _fill_lookups(self, slots: np.ndarray) -> None:
        for source in self._lookups:
            source.on_device.fill(source.calibration.line, slots)

    def _found(
        self,
        outputs: tuple[torch.Tensor, ...],
        num_reqs: int,
        grown: Sequence[torch.Tensor],
    ) -> Callable[[], Found]:
        wait = read_later(*(output[:num_reqs] for output in outputs), *grown)

        def found() -> Found:
            lengths, parents, scores, by_source, *of_ssms = wait()
            return Found(lengths, parents, scores, by_source, tuple(of_ssms))

        return found

    def _graphs(self, num_reqs: int, draws: bool) -> Sequence[TreeGraphs]:
        return [source.on_device.of(num_reqs, draws) for source in self._ssms]

    def _captured(self, inputs: TreeInputs, graphs: Sequence[TreeGraphs]) -> Captured:
        """Lookups, and trees of these requests from them and what SSMs have grown."""
        ends = [source.on_device.ends for source in self._lookups]
        growths = [of_source.growth for of_source in graphs]
        ends += [growth.ends for growth in growths]
        merger = Union(ends, self.buffers.tokens.device)

        def finish() -> tuple[torch.Tensor, ...]:
            sources = [
                source.on_device.find(inputs.slots, inputs.grows)
                for source in self._lookups
            ] + [
                self._best_of(source, growth, alone=len(ends) == 1)
                for source, growth in zip(self._ssms, growths, strict=False)
            ]
            union, columns, scores = merger.of(sources)
            slots = torch.where(inputs.grows, inputs.slots, self.buffers.padding)
            tree = best_trees(union, self._num_nodes, self._least, slots, self.buffers)
            if self.buffers.draws is not None and any(g.draws for g in graphs):
                self._keep_draws(slots, tree, columns, graphs)
            lengths = self._texts.lengths[inputs.slots]
            by_source = merger.given(tree, columns, scores)
            return lengths, tree.parents, tree.scores, by_source

        return captured(finish, self.buffers.tokens.device, self._vllm_config)

    def _best_of(
        self, source: NeuralSource, growth: DeviceGrowth, alone: bool
    ) -> DeviceCandidates:
        """What an SSM may contribute."""
        found = DeviceCandidates(growth.tokens, growth.parents.long(), growth.scores)
        if alone and source.num_nodes >= self._num_nodes:
            return found  # the tree has its best
        return cut(found, source.num_nodes)

    def _keep_draws(
        self,
        slots: torch.Tensor,
        tree: DeviceTree,
        columns: torch.Tensor,
        graphs: Sequence[TreeGraphs],
    ) -> None:
        """Note what was drawn below the rows of R trees.

        Args:
            slots: [R] int64 request slots; several may be padding.
            tree: The trees.
            columns: [R, C] of all sources' candidates in their union.
            graphs: What the SSMs have grown.
        """
        kept, first = self.buffers.draws, 0
        kept.clear(slots)
        for source, graph in enumerate(graphs):
            for level, draws in zip(graph.growth.levels, graph.draws, strict=True):
                rows = rows_of(level, columns, first, tree)
                kept.write(slots, rows, source, draws)
            first += graph.growth.ends[-1]


def can_draft_ahead(sources: SourceSet) -> bool:
    """Whether nothing has to be asked that only the host can ask."""
    return all(source.predictor is None for source in sources.all())
