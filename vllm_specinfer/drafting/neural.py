"""A neural SSM as a source: catch up, then grow a tree level by level."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData

from vllm_specinfer.drafting.children import ChildChooser, DraftRows
from vllm_specinfer.drafting.graphs import GraphShape
from vllm_specinfer.drafting.growth import TreeGrowth, level_sizes, level_words
from vllm_specinfer.drafting.source import DraftStep, DrawsByNode, Proposal
from vllm_specinfer.drafting.ssm import NeuralSSM
from vllm_specinfer.drafting.steps import TreeSteps
from vllm_specinfer.options import Tree
from vllm_specinfer.scheduling.budget import Budget
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.predictor import (
    ABOVE,
    OWN,
    Predictor,
    node_features,
)
from vllm_specinfer.tree.token_tree import num_words

if TYPE_CHECKING:
    from vllm_specinfer.drafting.device_trees import DeviceTrees
    from vllm_specinfer.drafting.text_copies import Texts


class NeuralSource:
    """One SSM and the shape of its trees.

    Dimension legend: B requests of the batch, R of them get a tree.
    """

    def __init__(
        self,
        ssm: NeuralSSM,
        chooser: ChildChooser,
        tree: Tree,
        num_nodes: int,
        budget: Budget,
        steps: TreeSteps | None = None,
    ) -> None:
        """Make a source of an SSM.

        Args:
            ssm: The SSM.
            chooser: Chooses the children of its nodes.
            tree: The shape.
            num_nodes: Most nodes that it may contribute to a tree.
            budget: Decides which nodes are expanded.
            steps: Grows trees; their definitions by default.
        """
        self._steps = steps or TreeSteps()
        self.ssm = ssm
        self.chooser = chooser
        self.tree = tree
        self.num_nodes = num_nodes
        self._budget = budget
        self.calibration = Calibration()
        self.predictor: Predictor | None = None
        self.on_device: DeviceTrees | None = None

    @property
    def work(self) -> tuple[int, int]:
        """Rows of forward passes so far, and passes over levels of trees."""
        return self.ssm.num_rows, self.ssm.num_levels

    @property
    def least(self) -> float:
        """The lowest score of a node."""
        return self.tree.least_score

    @property
    def most_nodes(self) -> int:
        """Of a level of one tree whose children are asked for, the roots' included."""
        return max((1, *level_sizes(self.tree, self.num_nodes)))

    def num_words(self, window: int) -> int:
        """64-bit words of what a row sees of its pass, in levels and in catching up.

        Args:
            window: Most tokens that a step adds to a text.
        """
        of_levels = level_words(self.tree, self.num_nodes)
        return max(of_levels, num_words(max(window, self.most_nodes)))

    def capture(self, texts: "Texts", window: int, num_reqs: int) -> None:
        """Capture graphs of what decoding runs: levels, and paths of that depth.

        Args:
            texts: Of all slots.
            window: Most tokens that a step adds to a text.
            num_reqs: Requests of the largest graphs.
        """
        # Its kernels need Triton.
        from vllm_specinfer.drafting.device_trees import DeviceTrees

        rows = max(window, self.most_nodes)
        self.ssm.capture(GraphShape(num_reqs, rows, self.num_words(window)))
        self.on_device = DeviceTrees(
            *(self.ssm, self.chooser, self.tree, self.num_nodes),
            *(num_reqs, texts, window),
        )

    def start(self, slot: int, request: NewRequestData) -> None:
        """A request starts in a slot."""
        self.ssm.start(slot, request)

    def begin(
        self, step: DraftStep, least: np.ndarray, most: int
    ) -> Callable[[], Proposal]:
        """Catch up with the whole batch, begin to grow the trees of R requests.

        Trees in graphs grow on the device while the host does something else; what
        draws that are tested were made from, and the predictor, are the host's.

        Args:
            step: The step.
            least: [R] log of the chance below which a node is sure to be left out.
            most: Nodes of a tree in this step; on the device all N grow.

        Returns:
            Waits for the trees.
        """
        hidden = self.ssm.catch_up(step)
        slots = step.slots[step.growing]
        tested = step.tests_draws and step.roots.sampled
        fits = self.on_device and 0 < len(slots) <= self.on_device.max_num_reqs
        if not fits or self.predictor or tested:
            proposal = self._grown(hidden, step, least, most)
            return lambda: proposal
        found = self.on_device.grow(
            hidden,
            slots,
            step.roots,
            self.calibration.line,
            self._budget.worth(),
        )
        return lambda: Proposal(found(), [{} for _ in slots])

    def follow(
        self,
        slots: np.ndarray,
        num_new: torch.Tensor,
        roots: DraftRows,
        states: torch.Tensor | None,
    ) -> int:
        """As `begin` where nobody waits; see `DeviceTrees.follow`."""
        return self.on_device.follow(
            slots,
            num_new,
            roots,
            states,
            self.calibration.line,
            self._budget.worth(),
        )

    def _grown(
        self, hidden: torch.Tensor, step: DraftStep, least: np.ndarray, most: int
    ) -> Proposal:
        slots, num_tokens = step.slots[step.growing], step.num_tokens[step.growing]
        grow = self._steps.grow if self.predictor is None else TreeGrowth
        growth = grow(
            self.tree,
            min(self.num_nodes, most),
            capacity=self.ssm.kv.capacity(slots, num_tokens),
            max_depth=self.ssm.max_model_len - num_tokens,
            least=least,
            worth=self._budget.worth(),
        )
        draws: DrawsByNode = [{} for _ in slots]
        if not len(slots):
            return Proposal(growth.finish(), draws)
        rows, requests = step.roots, np.arange(len(slots))
        above = np.zeros(len(slots))
        recent = self.predictor and self.predictor.guesses.recent(slots.tolist())
        while True:
            width = growth.num_children
            children = self.chooser.choose(
                *self.ssm.likeliest(hidden, self.chooser.num_candidates(width, rows)),
                width,
                rows,
            )
            if children.draws is not None and step.tests_draws:
                nodes = zip(requests.tolist(), rows.nodes.tolist(), strict=True)
                for f, (r, node) in enumerate(nodes):
                    if rows.temperatures[f]:
                        draws[r][node] = children.draws.row(f)
            scores, features = children.scores, None
            if self.predictor is None:
                scores = self.calibration.corrected(scores)
            else:
                features = node_features(
                    own=scores,
                    above=above[:, None],
                    rank=np.arange(scores.shape[1]),
                    depth=rows.depths[:, None] + 1,
                    temperature=rows.temperatures[:, None],
                    recent=recent[requests, None],
                )
                scores = self.predictor.corrected(features)
            frontier = growth.extend(scores, children.tokens, features)
            if frontier is None:
                return Proposal(growth.finish(), draws, growth.features)
            hidden = self.ssm.run_level(frontier, slots, num_tokens)
            requests = frontier.requests
            if growth.features is not None:
                expanded = growth.features[requests, frontier.nodes]
                above = expanded[:, OWN] + expanded[:, ABOVE]
            if rows.sampled or self.predictor is not None:  # nobody else asks
                rows = step.roots.below(requests, frontier.depth, frontier.nodes)
