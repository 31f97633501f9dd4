"""The captured passes of an SSM over the levels of trees, for so many requests.

Each level is one graph: its nodes run, and their children join the candidates. Before
the first, another graph may read what is new in the texts.

Dimension legend: R requests, F nodes of a level per request, K children of each, H
width of hidden states, D of a target's, T rows of a request that catch up.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vllm_specinfer.device import StagedBuffers, read_later
from vllm_specinfer.drafting.children import ChildChooser
from vllm_specinfer.drafting.device_growth import DeviceGrowth
from vllm_specinfer.drafting.graphs import GraphShape, PassRows, StaticPass
from vllm_specinfer.drafting.growth import level_words
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.drafting.text_copies import Texts
from vllm_specinfer.kernels.triton.catch_up import lay_out_last_rows
from vllm_specinfer.kernels.triton.coupled import coupled_children
from vllm_specinfer.kernels.triton.drawn import drawn_children
from vllm_specinfer.kernels.triton.growth import Paged, expand, extend
from vllm_specinfer.options import Tree
from vllm_specinfer.tree.device_draws import RowDraws
from vllm_specinfer.tree.token_tree import num_words


class TreeInputs(NamedTuple):
    """What the host knows of R requests before their trees grow.

    Attributes:
        slots: [R] int64 request slots.
        grows: [R] bool; the others are padding.
        limits: [R] int64 rows that the SSM's K/V has slots for.
        seeds: [R] int64.
        temperatures: [R] float32.
        top_k: [R] int64.
        top_p: [R] float32.
        min_p: [R] float32.
        correction: [2] float32 `Calibration.line`.
    """

    slots: np.ndarray
    grows: np.ndarray
    limits: np.ndarray
    seeds: np.ndarray
    temperatures: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    correction: np.ndarray

    @classmethod
    def padding(cls, num_reqs: int) -> "TreeInputs":
        """Requests that do not grow."""
        types = [np.int64, bool, np.int64, np.int64, np.float32, np.int64]
        types += [np.float32, np.float32]
        arrays = [np.zeros(num_reqs, kind) for kind in types]
        return cls(*arrays, np.zeros(2, np.float32))

    def padded(self, num_reqs: int) -> "TreeInputs":
        """These requests first, then padding; values of any type."""
        result = TreeInputs.padding(num_reqs)
        for whole, part in zip(result, self, strict=True):
            whole[: len(part)] = part
        return result


class TreeGraphs:
    """The captured levels of so many requests.

    Attributes:
        num_reqs: How many.
        growth: Of their trees.
        inputs: On the device.
    """

    def __init__(
        self,
        ssm: NeuralSSM,
        chooser: ChildChooser,
        tree: Tree,
        num_nodes: int,
        num_reqs: int,
        num_candidates: int,
        texts: Texts,
        window: int,
    ) -> None:
        """Capture them; the arguments are those of `DeviceTrees`."""
        device = ssm.device
        self._ssm = ssm
        self.num_reqs = num_reqs
        self._num_candidates = num_candidates
        self._draws = num_candidates > 1 and chooser.draws
        self._replaces = chooser.replaces
        self._texts = texts
        self.growth = DeviceGrowth(tree, num_nodes, num_reqs, device)
        sizes = self.growth.sizes
        padding = TreeInputs.padding(num_reqs)
        self._buffers = StagedBuffers(device, *padding)
        self.inputs = TreeInputs(*self._buffers.tensors)
        self._requests = torch.arange(num_reqs, device=device)[:, None]
        # [R] rows of the SSM's K/V and positions of the roots; what roots read.
        self._context = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        self._roots = torch.zeros_like(self._context)
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
        self._levels = [ssm.captured(launch) for launch in launches]
        # [R] tokens that the requests' last step has brought.
        self._num_new = torch.zeros_like(self._context)
        self._window = window
        # [R] each one's last row in the pass that catches up.
        self._last = torch.zeros_like(self._context)
        shape = GraphShape(num_reqs, window, num_words(window))
        rows = PassRows.level(shape)._replace(is_tree=np.zeros(num_reqs, bool))
        self._catch_up_pass = ssm.static_pass(shape, rows)
        # [R * T, D] that a head reads then.
        self._target_states: torch.Tensor | None = None
        if ssm.reads_states:
            self._target_states = ssm.target_states(num_reqs * window)
        self._catch_up_graph = ssm.captured(self._catch_up)

    @property
    def draws(self) -> list[RowDraws]:
        """What children of each level's nodes were drawn from, where they were."""
        return [RowDraws(*level.outputs) for level in self._levels if self._draws]

    def num_rows(self, num_levels: int) -> int:
        """Rows of a request in so many levels."""
        return sum(self.growth.sizes[1 : num_levels + 1])

    def fill(self, inputs: TreeInputs) -> None:
        """Say whose trees grow next."""
        self._buffers.fill(*inputs.padded(self.num_reqs))

    def start_at(self, hidden: torch.Tensor) -> None:
        """The roots' hidden states [R, hidden] are known."""
        self._hidden[: len(hidden)].copy_(hidden)
        if self._own[0] is not None:
            self._own[0][: len(hidden)].copy_(self._ssm.own_states)

    def catch_up(self, num_new: torch.Tensor, states: torch.Tensor | None) -> None:
        """Launch the pass over the tokens of the last step, [R] of each request."""
        self._num_new[: len(num_new)].copy_(num_new)
        if self._target_states is not None:
            states = states.flatten(0, 1)
            self._target_states[: len(states)].copy_(states)
        self._catch_up_graph.replay()

    def run(self, num_levels: int) -> None:
        """Launch the children of the roots and so many levels."""
        for captured in self._levels[: num_levels + 1]:
            captured.replay()

    def candidates(
        self, num_reqs: int, num_levels: int
    ) -> Callable[[], tuple[np.ndarray, ...]]:
        """Tokens, parents and scores of so many levels, when they are there."""
        growth = self.growth
        found = slice(0, num_reqs), slice(0, growth.ends[num_levels])
        return read_later(
            growth.tokens[found], growth.parents[found], growth.scores[found]
        )

    def _catch_up(self) -> tuple:
        """Run the last rows of each text; only new ones write K/V."""
        inputs, ssm, num_rows = self.inputs, self._ssm, self._window
        lay_out_last_rows(
            *(self._catch_up_pass.rows, self._last, inputs.slots, inputs.grows),
            *(self._num_new, self._texts, ssm.kv.paging, ssm.lookahead),
        )
        if self._target_states is not None:
            states = self._target_states.unflatten(0, (-1, num_rows))
            # The last of them is the last row's.
            rows = torch.arange(num_rows, device=ssm.device)
            places = (rows - self._last[:, None] - 1) % num_rows
            states = states[self._requests, places].flatten(0, 1)
            self._catch_up_pass.states.copy_(ssm.combined(states))
        hidden, *own = self._catch_up_pass.launch()
        torch.index_select(hidden, 0, self._last, out=self._hidden)
        if own:
            torch.index_select(own[0], 0, self._last, out=self._own[0])
        return ()

    def _start(self) -> tuple:
        inputs, lengths = self.inputs, self._texts.lengths
        self.growth.start(
            *(self._context, self._roots, inputs.slots, inputs.grows),
            *(lengths, self._ssm.lookahead),
        )
        return self._extend(0, self._hidden)

    def _paged(self) -> Paged:
        inputs, ssm = self.inputs, self._ssm
        return Paged(
            *ssm.kv.paging,
            inputs.slots,
            inputs.limits,
            self._context,
            self._roots,
            ssm.max_model_len,
        )

    def _extend(self, depth: int, hidden: torch.Tensor) -> tuple:
        """Children of the nodes at a depth, given their hidden states [R * F, H]."""
        inputs, k = self.inputs, self.growth.num_children[depth]
        rows = (
            *self._ssm.head.likeliest(hidden, max(k, self._num_candidates)),
            *(inputs.seeds, self._roots, inputs.temperatures),
            *(inputs.top_k, inputs.top_p, inputs.min_p),
        )
        draws = ()
        if self._draws:
            columns = self.growth.levels[depth].columns
            scores, children, draws = drawn_children(*rows, columns, k, self._replaces)
        else:
            scores, children = coupled_children(*rows, depth=depth, k=k)
        extend(self.growth, depth, scores, children, inputs.correction)
        return draws

    def _expand(self, depth: int) -> tuple:
        """Run the nodes of a depth that are expanded, and add their children."""
        sizes, level = self.growth.sizes, self.growth.levels[depth]
        run = self._passes[sizes[depth]]
        expand(self.growth, depth, self._paged(), run.rows)
        if run.states is not None:
            above = self._requests * sizes[depth - 1] + level.parents
            run.states.copy_(self._own[depth - 1][above.flatten()])
        hidden, *own = run.launch()
        if run.states is not None:
            self._own[depth].copy_(own[0])
        return self._extend(depth, hidden)
