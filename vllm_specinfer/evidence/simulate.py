"""Expected tokens per step of other trees, from a recorded one, without a model.

A simulated tree is grown by the engine's own `TreeGrowth` from the recorded scores and
keeps the nodes on the target's path that it has, too. What is exact: simulating the
recorded tree gives the recorded tokens per step, but for lookups, which know no
expansion. What is approximate:

- A recorded step starts where the recorded tree's path ended. Another tree would start
  its steps elsewhere: a smaller one also at tokens that lie inside recorded paths.
- A node has no more children than were recorded, and no tree is deeper: a best-first
  tree that may be wider or deeper is that only as far as the recorded tree goes.
- The trees of several sources were merged before they were recorded, so they are
  simulated as if one source had proposed them.
- Seconds come from a table; a draft costs the same for every pass over a level.

Greedy or under "coupled", the target's path does not depend on the tree; traces are
recorded with nothing else.

Dimension legend: S recorded steps, C recorded nodes, K children, N nodes of a tree.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vllm_specinfer.drafting.growth import TreeGrowth
from vllm_specinfer.evidence.tables import markdown, write_csv
from vllm_specinfer.evidence.trace import Trace
from vllm_specinfer.options import DEFAULT_MIN_PROBABILITY, ExpansionTree, Tree
from vllm_specinfer.parse_trees import default_tree, parse_tree
from vllm_specinfer.plots import figure_for
from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.token_tree import ROOT

# What is simulated by default, as far as it was recorded.
EXPANSIONS = ("1", "1,1", "1,1,1", "1,1,1,1", "2,1,1", "2,2,1", "3,2,1", "3,2,1,1")
EXPANSIONS += ("4,2,2,1,1",)
BEST_FIRST_NODES = (1, 2, 4, 8, 16, 32)
BEST_FIRST = "best-first, "
TABLE, CSV, PLOT = "simulation.md", "simulation.csv", "simulation.png"


@dataclass(frozen=True)
class Costs:
    """What steps take.

    Attributes:
        rows: [n] rows of a target step, ascending, the first at most `batch`.
        seconds: [n] its time; between two entries it is a line.
        level_seconds: Of one drafting pass over a level of the trees.
        batch: Requests per step.
    """

    rows: np.ndarray
    seconds: np.ndarray
    level_seconds: float = 0.0
    batch: int = 1

    def check_reach(self, most: int) -> None:
        """Raises ValueError where they do not go up to so many rows."""
        first, last = self.rows[0], self.rows[-1]
        if first > self.batch or most > last:
            raise ValueError(
                f"the costs must go from {self.batch} to {most} rows; got "
                f"{first:g} to {last:g}"
            )

    def over_plain(self, simulated: "Simulated") -> float:
        """Tokens per second over plain decoding's, every request with such trees."""
        rows = self.batch * (1 + simulated.nodes)
        self.check_reach(rows.max())
        step = np.interp(rows, self.rows, self.seconds)
        step += simulated.levels * self.level_seconds
        plain = np.interp(self.batch, self.rows, self.seconds)
        return float(simulated.tokens_per_step * plain / step.mean())


@dataclass(frozen=True)
class Simulated:
    """One tree on all steps of a trace.

    Attributes:
        name: Of the tree.
        accepted: [S] nodes on the target's path.
        nodes: [S] nodes of the tree.
        levels: [S] drafting passes that it took, the catch-up included.
    """

    name: str
    accepted: np.ndarray
    nodes: np.ndarray
    levels: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """The accepted nodes and one token more."""
        return 1 + float(self.accepted.mean())


def simulate(trace: Trace, name: str, tree: Tree, num_nodes: int) -> Simulated:
    """Grow one tree on every step.

    Args:
        trace: The recorded steps.
        name: Of the tree.
        tree: Its shape.
        num_nodes: Most nodes that it may have (N).

    Raises:
        ValueError: The expansion is wider or deeper than what was recorded.
    """
    if isinstance(tree, ExpansionTree) and not _fits(tree, trace.tree):
        raise ValueError(
            f"trees must fit in the recorded one, {list(trace.tree.widths)}; got "
            f"{list(tree.widths)}"
        )
    num_steps = len(trace.parents)
    no_limit = np.full(num_steps, np.iinfo(np.int32).max)
    growth = TreeGrowth(
        tree,
        num_nodes,
        capacity=no_limit,
        max_depth=no_limit,
        least=np.full(num_steps, tree.least_score),
    )
    steps, nodes = np.arange(num_steps), np.full(num_steps, ROOT)
    levels = np.zeros(num_steps, int)
    while True:
        levels[np.unique(steps)] += 1
        found = trace.children_of(steps, nodes, growth.num_children)
        frontier = growth.extend(*found)
        if frontier is None:
            break
        steps, nodes = frontier.requests, frontier.tokens
    kept = growth.finish().best(num_nodes, tree.least_score).tokens
    is_node = kept != NO_TOKEN
    on_path = trace.on_path[np.arange(num_steps)[:, None], kept] & is_node
    return Simulated(name, on_path.sum(axis=1), is_node.sum(axis=1), levels)


def _fits(tree: ExpansionTree, recorded: ExpansionTree) -> bool:
    pairs = zip(tree.widths, recorded.widths, strict=False)
    return tree.max_depth <= recorded.max_depth and all(a <= b for a, b in pairs)


def simulate_all(
    trace: Trace,
    expansions: Sequence[str] | None = None,
    nodes: Sequence[int] | None = None,
    min_probability: float = DEFAULT_MIN_PROBABILITY,
) -> list[Simulated]:
    """The recorded tree, expansions, and default best-first trees by their nodes.

    Args:
        trace: The recorded steps.
        expansions: None for the usual ones that were recorded.
        nodes: None likewise.
        min_probability: Of the best-first trees.

    Raises:
        ValueError: An expansion is none, or is wider or deeper than the recorded one.
    """
    if expansions is None:
        expansions = [t for t in EXPANSIONS if _fits(parse_tree(t), trace.tree)]
    if nodes is None:
        nodes = [n for n in BEST_FIRST_NODES if n <= trace.tree.num_nodes]
    recorded = ",".join(map(str, trace.tree.widths))
    found = []
    for text in dict.fromkeys([recorded, *expansions]):
        tree = parse_tree(text)
        found.append(simulate(trace, text, tree, tree.num_nodes))
    for n in nodes:
        tree = replace(default_tree(n), min_probability=min_probability)
        found.append(simulate(trace, f"{BEST_FIRST}{n}", tree, n))
    return found


def read_costs(file: Path, level_seconds: float, batch: int) -> Costs:
    """A CSV with the columns `rows` and `seconds`: what a target step takes.

    Raises:
        ValueError: The file has no such columns or no number in them.
        OSError: It cannot be read.
    """
    try:
        with file.open(newline="") as lines:
            pairs = sorted(
                (float(row["rows"]), float(row["seconds"]))
                for row in csv.DictReader(lines)
            )
        rows, seconds = np.array(pairs).T
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} must begin with the line rows,seconds and go on with numbers"
        ) from error
    return Costs(rows, seconds, level_seconds, batch)


def report(
    trace: Trace, simulated: Sequence[Simulated], costs: Costs | None, out: Path | None
) -> str:
    """A Markdown table; with a folder also there, with a CSV and a picture.

    Raises:
        ValueError: The costs do not reach far enough.
        OSError: The folder cannot be written.
    """
    rows = []
    for one in simulated:
        row = {
            "tree": one.name,
            "nodes": float(one.nodes.mean()),
            "levels": float(one.levels.mean()),
            "tokens per step": one.tokens_per_step,
        }
        if costs is not None:
            row["tokens/s over plain"] = costs.over_plain(one)
        rows.append(row)
    shown = [
        [v if isinstance(v, str) else f"{v:.2f}" for v in row.values()] for row in rows
    ]
    text = (
        f"{len(trace.parents)} recorded steps of {trace.tokens_per_step:.2f} tokens\n\n"
        + markdown(list(rows[0]), shown)
    )
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / TABLE).write_text(text)
        write_csv(out / CSV, rows)
        _plot(rows, out / PLOT)
    return text


def _plot(rows: Sequence[dict], file: Path) -> None:
    """Tokens per step, and tokens/s where known, by nodes; a line for best-first."""
    names = [name for name in rows[0] if name.startswith("tokens")]
    figure = figure_for(file, 7 * len(names), 4.5)
    if figure is None:
        return
    panels = figure.subplots(1, len(names), squeeze=False)
    best_first = [row for row in rows if row["tree"].startswith(BEST_FIRST)]
    expansions = [row for row in rows if row not in best_first]
    limits = ", ".join(row["tree"].removeprefix(BEST_FIRST) for row in best_first)
    for axes, name in zip(panels[0], names, strict=True):
        for group, style, label in (
            (expansions, "o", "expansions"),
            (best_first, "s-", f"best-first, at most {limits} nodes"),
        ):
            nodes = [row["nodes"] for row in group]
            axes.plot(nodes, [row[name] for row in group], style, label=label)
        for row in expansions:
            axes.annotate(
                row["tree"],
                (row["nodes"], row[name]),
                xytext=(0, -12),
                textcoords="offset points",
                ha="center",
                fontsize="x-small",
            )
        axes.set(xlabel="nodes per step, mean", ylabel=name)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(0.1)
        axes.legend()
    figure.savefig(file)
