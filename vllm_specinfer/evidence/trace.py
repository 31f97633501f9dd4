"""Traces: every tree that an engine verified, and what of it the target wrote.

A trace is JSONL. Its first line says what was recorded with what: `target`, `ssm`,
`prompts`, `tree` (the expansion), `temperature`, `max_tokens`, `command`, `versions`.
Each other line is one verified tree of one request, its nodes from the likeliest down:
`request`, and per node `depth` (1 for the root's children), `rank` among its siblings
(0 for the likeliest), `parent` (an earlier node, -1 for the root), `score` (log of the
chance that its sources give to its path) and `on_path` (1 where the target's own
tokens go through it).

Dimension legend: S recorded steps, C nodes of the widest recorded tree, F some of
their nodes, K children of each.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specinfer.options import ExpansionTree
from vllm_specinfer.parse_trees import parse_tree
from vllm_specinfer.tree.candidates import NO_TOKEN
from vllm_specinfer.tree.token_tree import ROOT

_COLUMNS = ("depth", "rank", "parent", "score", "on_path")


def step_line(
    request: int, parents: np.ndarray, scores: np.ndarray, accepted: list[int]
) -> str:
    """One verified tree as a line of a trace.

    Args:
        request: Number of the request.
        parents: [C] int32, a finished tree's, likeliest nodes first.
        scores: [C] float32.
        accepted: Nodes on the target's path.
    """
    depths: list[int] = []
    ranks: list[int] = []
    num_children: dict[int, int] = {}
    for parent in parents.tolist():
        depths.append(1 if parent == ROOT else depths[parent] + 1)
        ranks.append(num_children.get(parent, 0))
        num_children[parent] = ranks[-1] + 1
    on_path = np.isin(np.arange(len(parents)), accepted).astype(int)
    values = (depths, ranks, parents.tolist(), scores.tolist(), on_path.tolist())
    step = dict(zip(_COLUMNS, values, strict=True))
    return json.dumps({"request": request, **step}) + "\n"


@dataclass(frozen=True)
class Trace:
    """All steps of a trace; columns beyond a step's nodes are no nodes.

    Attributes:
        about: The first line.
        tree: The recorded expansion.
        requests: [S] number of the request.
        depths: [S, C] int64.
        parents: [S, C] int64.
        ranks: [S, C] int64.
        scores: [S, C] float64, -inf where there is no node.
        on_path: [S, C] bool.
    """

    about: dict[str, Any]
    tree: ExpansionTree
    requests: np.ndarray
    depths: np.ndarray
    parents: np.ndarray
    ranks: np.ndarray
    scores: np.ndarray
    on_path: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """What the recorded steps brought: the accepted nodes and one token more."""
        return 1 + float(self.on_path.sum(axis=1).mean())

    @cached_property
    def children(self) -> np.ndarray:
        """[S, C + 1, K] the child of each rank, -1 where there is none; row 0: root."""
        num_steps, num_nodes = self.parents.shape
        # Several sources together may give a node more children than each of them.
        most = max(*self.tree.widths, int(self.ranks.max()) + 1)
        shape = (num_steps, num_nodes + 1, most)
        children = np.full(shape, -1)
        steps, nodes = np.nonzero(np.isfinite(self.scores))
        rows, ranks = self.parents[steps, nodes] + 1, self.ranks[steps, nodes]
        children[steps, rows, ranks] = nodes
        return children

    def children_of(
        self, steps: np.ndarray, nodes: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The first children of some nodes.

        Args:
            steps: [F] steps of the nodes.
            nodes: [F] nodes, `ROOT` for the root.
            count: Children of each (K).

        Returns:
            [F, K] log chances given the parent, -inf where there is no child, and the
            children.
        """
        children = self.children[steps, nodes + 1, :count]
        scores = self.scores[steps[:, None], children]
        above = np.where(nodes == ROOT, 0.0, self.scores[steps, nodes])
        given = np.where(children == NO_TOKEN, -np.inf, scores - above[:, None])
        return given, children


def read_trace(file: Path) -> Trace:
    """A whole trace.

    Raises:
        ValueError: The file is not a trace, or holds no step.
        OSError: It cannot be read.
    """
    lines = _objects(file)
    about = next(lines, {})
    if "tree" not in about:
        raise ValueError(f"{file} must be a trace, as `record` writes it; got {about}")
    tree = parse_tree(about["tree"])
    if not isinstance(tree, ExpansionTree):
        raise ValueError(f"{file} must name an expansion; got {about['tree']}")
    requests: list[int] = []
    found: dict[str, list[list[float]]] = {name: [] for name in _COLUMNS}
    for number, step in enumerate(lines, start=2):
        columns = [step.get(name) for name in _COLUMNS]
        if not all(map(_is_column, columns)) or len(set(map(len, columns))) != 1:
            raise ValueError(
                f"{file}, line {number} must have as many numbers of each of "
                f"{', '.join(_COLUMNS)}; got {columns}"
            )
        requests.append(step.get("request", 0))
        for name in _COLUMNS:
            found[name].append(step[name])
    if not any(found["parent"]):
        raise ValueError(f"{file} must hold at least one step; got none")
    width = max(map(len, found["parent"]))

    def padded(name: str, fill: float, kind: type) -> np.ndarray:
        rows = [row + [fill] * (width - len(row)) for row in found[name]]
        return np.array(rows).astype(kind)

    return Trace(
        about,
        tree,
        np.array(requests),
        padded("depth", 0, int),
        padded("parent", ROOT, int),
        padded("rank", 0, int),
        padded("score", -np.inf, float),
        padded("on_path", 0, bool),
    )


def _is_column(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, int | float) for x in value)


def _objects(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{file}, line {number} must be JSON") from error
            if not isinstance(found, dict):
                raise ValueError(f"{file}, line {number} must be an object")
            yield found
