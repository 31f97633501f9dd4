"""Schedulers on a trace: the best static tree, "auto", "learned", and an oracle.

"auto" and "learned" are the engine's own: its sources, budget, growth and learning run
through the trace with a recorded SSM and a table of costs in place of a clock. Learning
goes on over the whole trace in its order; what is compared are the held-out steps. The
static tree is chosen by the other steps. The oracle knows the target's text: it drafts
only nodes on its path, and as many of them as raise the tokens per second.

What holds of simulated trees (`simulate.py`) holds here, too: another tree would start
its steps elsewhere. One request runs at a time.

Dimension legend: S steps, D depth of the oracle's trees.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_specinfer.drafting.children import Children, DraftRows
from vllm_specinfer.drafting.growth import Frontier
from vllm_specinfer.drafting.neural import NeuralSource
from vllm_specinfer.drafting.source import DraftStep
from vllm_specinfer.drafting.sources import SourceSet
from vllm_specinfer.evidence.simulate import Costs, Simulated, simulate_all
from vllm_specinfer.evidence.trace import Trace
from vllm_specinfer.parse_trees import default_tree
from vllm_specinfer.scheduling.load_budget import LoadBudget
from vllm_specinfer.scheduling.predictor import Predictor
from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.token_tree import ROOT

_UNLIMITED = 1 << 20  # tokens and slots


class RecordedKV:
    """As if all tokens had been read, without a limit."""

    def num_unread(self, slots: np.ndarray, num_tokens: np.ndarray) -> int:
        """None."""
        return 0

    def capacity(self, slots: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """No limit."""
        return np.full(len(slots), _UNLIMITED)


class RecordedSSM:
    """A trace in place of an SSM and of what chooses its children.

    Tokens are nodes of the recorded tree, hidden states are their steps and nodes.
    """

    max_model_len = _UNLIMITED
    # Tests of draws are not recorded.
    draws = False

    def __init__(self, trace: Trace) -> None:
        self._trace, self.kv = trace, RecordedKV()
        self.step = self.num_rows = self.num_levels = self.num_passes = 0

    def skip(self, step: DraftStep) -> None:
        """Nothing is kept."""

    def is_far_behind(self, step: DraftStep) -> bool:
        """What it was not asked for it need not read."""
        return False

    def catch_up(self, step: DraftStep) -> tuple[np.ndarray, np.ndarray]:
        """The root of the step's tree."""
        self.num_rows += 1
        self.num_passes += 1
        return np.array([self.step]), np.array([ROOT])

    def likeliest(
        self, hidden: tuple[np.ndarray, np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """[F, K] log chances and nodes of the recorded children."""
        return self._trace.children_of(*hidden, count)

    def run_level(
        self, frontier: Frontier, slots: np.ndarray, num_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The nodes of a level."""
        self.num_levels += 1
        self.num_passes += 1
        self.num_rows += len(frontier.tokens)
        return np.full(len(frontier.tokens), self.step), frontier.tokens

    def num_candidates(self, num_children: int, rows: DraftRows) -> int:
        """No more than there will be children."""
        return num_children

    def choose(
        self, scores: np.ndarray, tokens: np.ndarray, width: int, rows: DraftRows
    ) -> Children:
        """All that were recorded."""
        return Children(scores, tokens)


def replay(
    trace: Trace, name: str, predictor: Predictor | None, costs: Costs, num_nodes: int
) -> tuple[Simulated, np.ndarray]:
    """The engine's scheduler on every step of a trace, in order.

    Args:
        trace: The recorded steps.
        name: Of the scheduler.
        predictor: Of "learned", which goes on learning; None for "auto".
        costs: What steps take.
        num_nodes: Most nodes of a tree (N).

    Returns:
        Its trees, and [S] how many of their nodes it expected to be accepted.
    """
    tree, budget = default_tree(num_nodes), LoadBudget(num_nodes)
    tree = replace(tree, max_depth=min(tree.max_depth, trace.tree.max_depth))
    ssm = RecordedSSM(trace)
    source = NeuralSource(ssm, ssm, tree, num_nodes, budget)
    source.predictor = predictor
    sources = SourceSet([], [source], tree, num_nodes, budget)
    temperature = np.array([trace.about.get("temperature", 0.0)], np.float32)
    nothing = np.zeros(1, np.int64)
    roots = DraftRows(*[nothing] * 4, temperature, *[nothing] * 3)
    found, expected = np.zeros((3, len(trace.requests)), int), []
    for s, request in enumerate(trace.requests.tolist()):
        ssm.step, before = s, ssm.num_passes
        step = SimpleNamespace(
            growing=np.array([0]),
            slots=np.array([request]),
            num_tokens=np.array([1]),
            roots=roots,
            ended=False,
            tests_draws=False,
        )
        drafts = sources.propose(step)
        trees = drafts.trees
        tokens = trees.tokens[0]
        is_node = tokens != NO_TOKEN
        accepted = np.flatnonzero(is_node & trace.on_path[s, tokens])
        size = int(is_node.sum())
        found[:, s] = len(accepted), size, ssm.num_passes - before
        expected.append(float(np.exp(trees.scores[0]).sum()))
        sources.experience.observe(request, accepted.tolist(), size)
        if drafts.work is not None:
            rows, levels = drafts.work  # one pass catches up
            budget.observe_draft(1, rows, levels, costs.level_seconds * (1 + levels))
        seconds = float(np.interp(1 + size, costs.rows, costs.seconds))
        budget.observe_step(1 + size, seconds, size > 0)
    return Simulated(name, *found), np.array(expected)


def oracle(trace: Trace, costs: Costs, num_nodes: int) -> Simulated:
    """Trees of nodes on the target's path only, as long as they are worth it."""
    most = min(num_nodes, default_tree(num_nodes).max_depth)
    lengths = np.minimum(trace.on_path.sum(axis=1), most)
    depths = np.arange(most + 1)
    seconds = np.interp(1 + depths, costs.rows, costs.seconds)
    seconds = seconds + depths * costs.level_seconds
    # The best rate is that at which the best trees bring just what they cost.
    rate = 0.0
    while True:
        gained = 1 + depths - rate * seconds
        gained = np.where(depths <= lengths[:, None], gained, -np.inf)
        chosen = gained.argmax(axis=1)
        better = (1 + chosen).sum() / seconds[chosen].sum()
        if better <= rate:
            return Simulated("oracle", chosen, chosen, chosen)
        rate = better


def compare(
    trace: Trace,
    held_out: np.ndarray,
    predictor: Predictor,
    costs: Costs,
    num_nodes: int,
) -> list[dict[str, Any]]:
    """Tokens per second over plain decoding of all schedulers, a row each.

    Args:
        trace: The recorded steps.
        held_out: [S] bool, those that are compared.
        predictor: Fitted to the others; it is not changed.
        costs: What steps take.
        num_nodes: Most nodes of a tree (N).

    Raises:
        ValueError: The costs do not reach far enough.
    """
    limits = [n for n in (1, 2, 4, 8, 16, 32) if n <= num_nodes]
    static = [
        t for t in simulate_all(trace, None, limits) if t.nodes.max() <= num_nodes
    ]
    static.append(Simulated("no tree", *np.zeros((3, len(held_out)), int)))
    best = max(static, key=lambda one: costs.over_plain(_only(one, ~held_out)))
    fitted = Predictor()
    fitted.recall(predictor.learned())
    replayed = [
        replay(trace, "auto", None, costs, num_nodes),
        replay(trace, "learned, online", Predictor(fitted.size), costs, num_nodes),
        replay(trace, "learned, fitted", fitted, costs, num_nodes),
    ]
    expected = {one.name: lengths[held_out] for one, lengths in replayed}
    rows = []
    for one in (best, *(one for one, _ in replayed), oracle(trace, costs, num_nodes)):
        held = _only(one, held_out)
        known = one.name in expected
        rows.append(
            {
                "scheduler": f"static, {one.name}" if one is best else one.name,
                "tokens per step": held.tokens_per_step,
                "nodes": float(held.nodes.mean()),
                "passes": float(held.levels.mean()),
                "tokens/s over plain": costs.over_plain(held),
                "predicted length": float(expected[one.name].mean()) if known else "",
                "actual length": float(held.accepted.mean()),
            }
        )
    return rows


def _only(simulated: Simulated, steps: np.ndarray) -> Simulated:
    columns = (simulated.accepted, simulated.nodes, simulated.levels)
    return Simulated(simulated.name, *(column[steps] for column in columns))
