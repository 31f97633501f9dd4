"""Fitting the learned scheduler to traces, and what it is worth on held-out prompts.

Every tested node of a trace, one whose parent the target's text goes through, is a
sample: what the predictor may see of it, and whether the text goes through it, too.
Each fourth prompt is held out: nothing is fitted to it or chosen by it.

Dimension legend: S steps, C nodes of the widest tree, X features, n samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_specinfer.evidence.replay import compare
from vllm_specinfer.evidence.simulate import Costs
from vllm_specinfer.evidence.tables import markdown_of, write_csv
from vllm_specinfer.evidence.trace import Trace, read_trace
from vllm_specinfer.plots import figure_for
from vllm_specinfer.results import made_by, write_json
from vllm_specinfer.scheduling.calibration import Calibration
from vllm_specinfer.scheduling.predictor import (
    DEFAULT_SIZE,
    FEATURES,
    NEUTRAL,
    OWN,
    Guesses,
    Predictor,
    node_features,
)
from vllm_specinfer.tree.token_tree import ROOT

HELD_OUT_EACH = 4
# Ends of the names of the tables and the picture.
BESIDE = TABLE, SCHEDULERS, TEXT, PICTURE = ".csv", ".schedulers.csv", ".md", ".png"
EPOCHS, BATCH, RATE = 30, 256, 2e-2
_GROUPS = 10


@dataclass(frozen=True)
class Nodes:
    """The nodes of a trace as a predictor sees them.

    Attributes:
        features: [S, C, X].
        parents: [S, C].
        tested: [S, C] bool: the parent is on the target's path.
        right: [S, C] bool: the node is.
    """

    features: np.ndarray
    parents: np.ndarray
    tested: np.ndarray
    right: np.ndarray

    @property
    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """[n, X] features of tested nodes, [n] whether they are right."""
        return self.features[self.tested], self.right[self.tested]

    def only(self, steps: np.ndarray) -> "Nodes":
        """The steps that are chosen, [S] bool."""
        columns = vars(self).items()
        return Nodes(**{name: values[steps] for name, values in columns})

    def without(self, feature: int) -> "Nodes":
        """A feature says the same of all nodes."""
        features = self.features.copy()
        known = np.isfinite(features[..., OWN])
        features[known, feature] = NEUTRAL[feature]
        return Nodes(features, self.parents, self.tested, self.right)

    def path_chances(self, logs: np.ndarray) -> np.ndarray:
        """[S, C] chances of whole paths, given each node's log chance [S, C]."""
        paths = np.zeros_like(logs)
        steps = np.arange(len(logs))
        for c in range(logs.shape[1]):
            parent = self.parents[:, c]
            above = np.where(parent == ROOT, 0.0, paths[steps, parent])
            paths[:, c] = above + logs[:, c]
        return np.exp(paths)


def joined(parts: Sequence[Nodes]) -> Nodes:
    """Nodes of several traces of one tree, one after the other."""
    columns = vars(parts[0])
    return Nodes(**{k: np.concatenate([vars(p)[k] for p in parts]) for k in columns})


def nodes_of(trace: Trace) -> Nodes:
    """What a predictor would have seen while the trace was recorded."""
    steps, missing = np.arange(len(trace.parents))[:, None], np.isneginf(trace.scores)
    top = trace.parents == ROOT
    above = np.where(top, 0.0, trace.scores[steps, trace.parents])
    tested = (top | trace.on_path[steps, trace.parents]) & ~missing
    guesses = Guesses()
    recent = np.zeros(len(trace.parents))
    for s, request in enumerate(trace.requests.tolist()):
        (recent[s],) = guesses.recent([request])
        first = tested[s] & (trace.ranks[s] == 0)
        guesses.observe(request, trace.on_path[s, first])
    features = node_features(
        own=trace.scores - np.where(missing, 0.0, above),
        above=np.where(missing, 0.0, above),
        rank=trace.ranks,
        depth=trace.depths,
        temperature=trace.about.get("temperature", 0.0),
        recent=recent[:, None],
    )
    return Nodes(features, trace.parents, tested, trace.on_path)


def fit(features: np.ndarray, right: np.ndarray, size: int = DEFAULT_SIZE) -> Predictor:
    """A predictor of samples, by Adam.

    Args:
        features: [n, X].
        right: [n] bool.
        size: Hidden units.
    """
    predictor, rng = Predictor(size), np.random.default_rng(0)
    num_batches = -(-len(right) // BATCH)
    num_steps = EPOCHS * num_batches
    weights = torch.from_numpy(predictor.weights)  # the same memory
    adam = torch.optim.Adam([weights], lr=RATE)
    rate = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, num_steps)
    for step in range(num_steps):
        if step % num_batches == 0:
            order = rng.permutation(len(right))
        batch = order[step % num_batches * BATCH :][:BATCH]
        slope = predictor.gradient(features[batch], right[batch]) / len(batch)
        weights.grad = torch.from_numpy(slope)
        adam.step()
        rate.step()
    # Learning goes on with small steps.
    predictor.recall({**predictor.learned(), "steps": len(right)})
    return predictor


def quality(name: str, logs: np.ndarray, nodes: Nodes) -> dict[str, Any]:
    """How good predictions [S, C] (logs of chances) are, as a row of the table.

    `loss` is the mean negative log likelihood of tested nodes; lengths are those of the
    target's path inside the recorded tree; the errors compare means of ten groups.
    """
    chances = np.exp(logs[nodes.tested])
    right = nodes.right[nodes.tested]
    inside = np.clip(chances, 1e-6, 1 - 1e-6)
    loss = -np.log(np.where(right, inside, 1 - inside)).mean()
    predicted = nodes.path_chances(logs).sum(axis=1)
    actual = nodes.right.sum(axis=1)
    return {
        "chances": name,
        "loss": float(loss),
        "calibration error": _calibration_error(chances, right),
        "predicted length": float(predicted.mean()),
        "actual length": float(actual.mean()),
        "length error": _calibration_error(predicted, actual),
        "correlation": float(np.corrcoef(predicted, actual)[0, 1]),
    }


def online(nodes: Nodes, predictor: Predictor | None) -> np.ndarray:
    """[S, C] logs of chances, each step's before anything is learned from it.

    Args:
        nodes: Of traces.
        predictor: Learns; None for the one number of the scheduler "auto".
    """
    logs = np.full(nodes.tested.shape, -np.inf)
    calibration = Calibration()
    for s, features in enumerate(nodes.features):
        tested = nodes.tested[s]
        right = nodes.right[s, tested]
        if predictor is not None:
            logs[s] = predictor.corrected(features)
            predictor.observe(0, features[tested], right)
        else:
            logs[s] = calibration.corrected(features[:, OWN])
            expected = float(np.exp(logs[s, tested]).sum())
            calibration.observe(expected, int(right.sum()))
    return logs


class Fitted(NamedTuple):
    """What a fit is worth.

    Attributes:
        text: The tables, Markdown.
        schedulers: A row per trace and scheduler; none without costs.
    """

    text: str
    schedulers: list[dict[str, Any]]


def check_prompts(name: Path | str, num_prompts: int) -> None:
    """Raises ValueError where these are too few to hold some out."""
    if num_prompts < HELD_OUT_EACH:
        raise ValueError(
            f"{name} must hold at least {HELD_OUT_EACH} prompts, as each fourth is "
            f"held out; got {num_prompts}"
        )


def fit_scheduler(
    traces: Sequence[Path],
    out: Path,
    size: int,
    sizes: Sequence[int],
    costs: Costs | None,
    num_nodes: int,
) -> Fitted:
    """Fit a predictor and say what it is worth on held-out prompts.

    Args:
        traces: What `record` has written with one tree, a workload each.
        out: The file for `{"scheduler": {"type": "learned", "file": out}}`; tables and
            a picture stand beside it, named after it.
        size: Hidden units of the predictor that is written.
        sizes: Further sizes to compare.
        costs: What steps take, to compare schedulers; None to leave that out.
        num_nodes: Most nodes of a tree there.

    Raises:
        ValueError: A trace is none or too short, or the costs do not reach far enough.
        OSError: A file cannot be read or written.
    """
    whole = [read_trace(file) for file in traces]
    for file, trace in zip(traces, whole, strict=True):
        check_prompts(file, len(np.unique(trace.requests)))
        if trace.scores.shape[1:] != whole[0].scores.shape[1:]:
            raise ValueError(
                f"traces must be of one tree; got {list(whole[0].tree.widths)} and "
                f"{list(trace.tree.widths)}"
            )
    held_out = [held_out_steps(trace) for trace in whole]
    predictor, rows = _fitted(whole, np.concatenate(held_out), size, sizes, out)
    about = {"traces": [trace.about for trace in whole], **made_by()}
    write_json(out, {"predictor": predictor.learned(), "about": about})
    write_csv(out.with_suffix(TABLE), rows)
    text, schedulers = markdown_of(rows), []
    if costs is not None:
        schedulers = [
            {"trace": file.stem, **row}
            for file, trace, held in zip(traces, whole, held_out, strict=True)
            for row in compare(trace, held, predictor, costs, num_nodes)
        ]
        write_csv(out.with_suffix(SCHEDULERS), schedulers)
        text += "\n" + markdown_of(schedulers)
    out.with_suffix(TEXT).write_text(text)
    return Fitted(text, schedulers)


def held_out_steps(trace: Trace) -> np.ndarray:
    """[S] bool: the steps of each fourth prompt."""
    _, numbers = np.unique(trace.requests, return_inverse=True)
    return numbers % HELD_OUT_EACH == HELD_OUT_EACH - 1


def _fitted(
    traces: Sequence[Trace],
    held_out: np.ndarray,
    size: int,
    sizes: Sequence[int],
    out: Path,
) -> tuple[Predictor, list[dict[str, Any]]]:
    """The predictor of `size`, and the table of all that it is compared with."""
    nodes = joined([nodes_of(trace) for trace in traces])
    train, test = nodes.only(~held_out), nodes.only(held_out)
    print(f"{train.tested.sum()} tested nodes, {test.tested.sum()} held out")
    predicted = {
        "the source's own": test.features[..., OWN],
        "one number, online (auto)": online(nodes, None)[held_out],
        f"{size} hidden, online": online(nodes, Predictor(size))[held_out],
    }
    rows = [quality(name, logs, test) for name, logs in predicted.items()]

    def add(name: str, train: Nodes, test: Nodes, hidden: int) -> Predictor:
        predictor = fit(*train.samples, hidden)
        predicted[name] = predictor.corrected(test.features)
        rows.append(quality(name, predicted[name], test))
        print(f"{name}: held-out loss {rows[-1]['loss']:.4f}", flush=True)
        return predictor

    found = {
        hidden: add(f"{hidden} hidden, fitted", train, test, hidden)
        for hidden in sorted({size, *sizes})
    }
    for feature, name in enumerate(FEATURES):
        if np.ptp(train.samples[0][:, feature]) > 0:
            less = train.without(feature), test.without(feature)
            add(f"{size} hidden, without {name}", *less, size)
    out.parent.mkdir(parents=True, exist_ok=True)
    shown = ("the source's own", f"{size} hidden, fitted")
    _plot({name: predicted[name] for name in shown}, test, out.with_suffix(PICTURE))
    return found[size], rows


def groups(predicted: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of both [10], in ten groups of equal size by what was predicted."""
    order = np.array_split(np.argsort(predicted, kind="stable"), _GROUPS)
    order = [group for group in order if len(group)]
    means = [(predicted[i].mean(), actual[i].mean()) for i in order]
    return np.array(means).T


def _calibration_error(predicted: np.ndarray, actual: np.ndarray) -> float:
    """How far the means of ten equal groups lie apart, on average."""
    return float(np.abs(np.subtract(*groups(predicted, actual))).mean())


def _plot(predicted: dict[str, np.ndarray], nodes: Nodes, file: Path) -> None:
    """Actual over predicted, of nodes and of matched lengths."""
    figure = figure_for(file, 11, 4.5)
    if figure is None:
        return
    left, right = figure.subplots(1, 2)
    for name, logs in predicted.items():
        chances = np.exp(logs[nodes.tested])
        left.plot(*groups(chances, nodes.right[nodes.tested]), "o-", label=name)
        lengths = nodes.path_chances(logs).sum(axis=1)
        right.plot(*groups(lengths, nodes.right.sum(axis=1)), "o-", label=name)
    for axes, what in ((left, "chance of a node"), (right, "matched length")):
        axes.axline((0, 0), slope=1, color="gray", linewidth=0.8)
        axes.set(xlabel=f"predicted {what}", ylabel=f"actual {what}")
        axes.legend()
    figure.savefig(file)
