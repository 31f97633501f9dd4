"""Trees of an SSM that grow on the device in CUDA graphs: one launch per level.

The host fills the inputs and launches as many levels as usually pay. Then it either
waits once, for the candidates of all of them (`grow`), or goes on without them
(`follow`): even how long the texts are it does not need to know. Growing on the host
(`NeuralSource`) it waits for each level.

Dimension legend: R requests, C candidates per request, T rows of a request that catch
up.
"""

from collections.abc import Callable

import numpy as np
import torch

from vllm_specinfer.drafting.children import NUM_CANDIDATES, ChildChooser, DraftRows
from vllm_specinfer.drafting.graphs import graph_sizes
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.drafting.text_copies import Texts
from vllm_specinfer.drafting.tree_graphs import TreeGraphs, TreeInputs
from vllm_specinfer.options import Tree
from vllm_specinfer.scheduling.budget import Worth
from vllm_specinfer.scheduling.levels import Levels
from vllm_specinfer.tree.candidates import Candidates


class DeviceTrees:
    """Graphs for 1, 2, 4, ... requests, each for greedy ones and for any.

    Attributes:
        max_num_reqs: Requests of the largest.
    """

    def __init__(
        self,
        ssm: NeuralSSM,
        chooser: ChildChooser,
        tree: Tree,
        num_nodes: int,
        max_num_reqs: int,
        texts: Texts,
        window: int,
    ) -> None:
        """Capture everything; the SSM's own passes must have been captured.

        Args:
            ssm: The SSM.
            chooser: Says how children of its nodes are chosen.
            tree: The shape of its trees.
            num_nodes: Nodes to keep per tree.
            max_num_reqs: Requests of the largest graphs.
            texts: Of all slots.
            window: Most tokens that a step adds to a text (T).
        """
        self._ssm, self._chooser = ssm, chooser
        self.max_num_reqs = max_num_reqs
        self._num_nodes = num_nodes
        self._window = window
        captured = [
            (
                size,
                [
                    TreeGraphs(ssm, chooser, tree, num_nodes, size, m, texts, window)
                    for m in (1, NUM_CANDIDATES)
                ],
            )
            for size in graph_sizes(max_num_reqs)
        ]
        # By the most requests, ascending: for greedy ones, for any.
        self._graphs = captured[::-1]
        growth = captured[0][1][0].growth
        self.levels = Levels(growth.sizes[1:], growth.ends)

    def of(self, num_reqs: int, draws: bool) -> TreeGraphs:
        """The graphs for so many requests, some of which draw."""
        of_size = next(graphs for size, graphs in self._graphs if size >= num_reqs)
        return of_size[int(draws)]

    def grow(
        self,
        hidden: torch.Tensor,
        slots: np.ndarray,
        roots: DraftRows,
        correction: tuple[float, float],
        worth: Worth,
    ) -> Callable[[], Candidates]:
        """Launch the growth of R trees.

        Args:
            hidden: [R, hidden] of the roots.
            slots: [R] request slots.
            roots: The requests' parameters.
            correction: `Calibration.line`.
            worth: Of expanding nodes.

        Returns:
            Waits for the candidates.
        """
        graphs = self.of(len(slots), roots.sampled)
        graphs.fill(self._inputs(slots, roots, correction))
        graphs.start_at(hidden)
        num_levels = self._run(graphs, worth, len(slots))
        wait = graphs.candidates(len(slots), num_levels)

        def found() -> Candidates:
            candidates = Candidates(*wait())
            self.levels.observe(candidates.scores)
            return candidates.cut(self._num_nodes)

        return found

    def follow(
        self,
        slots: np.ndarray,
        num_new: torch.Tensor,
        roots: DraftRows,
        states: torch.Tensor | None,
        correction: tuple[float, float],
        worth: Worth,
    ) -> int:
        """Launch the catch-up with R requests and the growth of their trees.

        The SSM has read all but the tokens of the last step.

        Args:
            slots: [R] request slots.
            num_new: [R] tokens of the last step, on the device.
            roots: The requests' parameters; their positions do not matter.
            states: [R, T, D] of the last rows that stay; a head reads them.
            correction: `Calibration.line`.
            worth: Of expanding nodes.

        Returns:
            How many levels are launched.
        """
        graphs = self.of(len(slots), roots.sampled)
        graphs.fill(self._inputs(slots, roots, correction))
        graphs.catch_up(num_new, states)
        self._ssm.num_rows += graphs.num_reqs * self._window
        return self._run(graphs, worth, len(slots))

    def _inputs(
        self, slots: np.ndarray, roots: DraftRows, correction: tuple[float, float]
    ) -> TreeInputs:
        seeds = roots.seeds
        if self._chooser.draws:
            seeds = self._chooser.draw_seeds(seeds)
        return TreeInputs(
            slots=slots,
            grows=np.ones(len(slots), bool),
            limits=self._ssm.kv.limits(slots),
            seeds=seeds,
            temperatures=roots.temperatures,
            top_k=roots.top_k,
            top_p=roots.top_p,
            min_p=roots.min_p,
            correction=np.array(correction),
        )

    def _run(self, graphs: TreeGraphs, worth: Worth, num_reqs: int) -> int:
        num_levels = self.levels.worth(worth, num_reqs, graphs.num_reqs)
        graphs.run(num_levels)
        self._ssm.num_rows += graphs.num_reqs * graphs.num_rows(num_levels)
        self._ssm.num_levels += num_levels
        return num_levels
