"""The learned chance that a node is accepted where its parent was.

A perceptron corrects what its source believes by what costs nothing to know:

    logit(chance) = logit(own) + x w + b + tanh(x V + c) u

with x the scaled features. It begins with w, b and u at 0, the source's own chance, and
learns from every tested node. SpecInfer's matching-length predictor (arXiv 2305.09781,
version of 2023): the expected length of a tree is the sum of its paths' chances.

Dimension legend: F rows of a level, K children of each, X features, H hidden units.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_specinfer.keys import refuse_unknown_keys
from vllm_specinfer.scheduling.cost import finite

# Log of the source's own chance of the node given its parent, and of its parent's path;
# rank among its siblings, depth, temperature of the request, and how often the source's
# first guess was right in the request's recent steps.
FEATURES = ("own", "above", "rank", "depth", "temperature", "recent")
OWN, ABOVE, RANK, DEPTH, TEMPERATURE, RECENT = range(len(FEATURES))
# What stands for a feature that says nothing: its middle.
NEUTRAL = np.array([np.log(0.5), -1.0, 1.0, 2.0, 0.5, 0.5])
# As the perceptron sees them, features are of about this size around their middle.
_SIZE = np.array([4.0, 3.0, 2.0, 2.0, 1.0, 0.3])
_MIDDLE = np.array([0.0, *NEUTRAL[1:]])  # the logit of the source's own chance
# Beyond these a source's own chances say no more.
_LEAST, _MOST = np.log(1e-4), np.log(1 - 1e-4)
_LEAST_ABOVE = -8.0

DEFAULT_SIZE = 8
MAX_SIZE = 256
# Steps of the descent: large at the start, then as small as this.
_LEAST_RATE, _FIRST_STEPS = 0.01, 10
_MOST_WEIGHT = 20.0
# Of the guesses before a step so much counts after it.
_MEMORY = 0.9
# Of its opinion a predictor loses so much per step without a test; as `Calibration`.
_FORGIVEN = 1e-4
_KEYS = ("features", "size", "weights", "steps")


def node_features(
    own: np.ndarray,
    above: np.ndarray,
    rank: np.ndarray,
    depth: np.ndarray,
    temperature: np.ndarray,
    recent: np.ndarray,
) -> np.ndarray:
    """[..., X] the features of nodes, from arrays that broadcast."""
    columns = np.broadcast_arrays(own, above, rank, depth, temperature, recent)
    return np.stack(columns, axis=-1).astype(np.float64)


class Guesses:
    """How often a source's first guess was right lately, by request slot."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def start(self, slot: int) -> None:
        """A request starts in a slot."""
        self._counts.pop(slot, None)

    def recent(self, slots: Sequence[int]) -> np.ndarray:
        """[F] the share; one half where nothing was tested yet."""
        counts = [self._counts.get(slot, (0.0, 0.0)) for slot in slots]
        return np.array([(right + 1) / (tested + 2) for right, tested in counts])

    def observe(self, slot: int, right: np.ndarray) -> None:
        """First guesses that were tested in one step, and whether they were right."""
        if len(right):
            hits, tested = self._counts.get(slot, (0.0, 0.0))
            hits, tested = _MEMORY * hits + right.sum(), _MEMORY * tested + len(right)
            self._counts[slot] = float(hits), float(tested)


class Predictor:
    """One source's chances, corrected; learns online."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        """Begin with the source's own chances.

        Args:
            size: Hidden units (H); 0 for logistic regression.
        """
        num_features = len(FEATURES)
        self.size = size
        self.guesses = Guesses()
        # All weights one after the other: w [X], b [1], V [X, H], c [H], u [H].
        self.weights = np.zeros(num_features + 1 + (num_features + 2) * size)
        hidden = np.random.default_rng(0).standard_normal(num_features * size)
        self._parts()[2][:] = hidden.reshape(num_features, size)
        self._num_steps = 0
        # Since the last step.
        self._tested = False

    def corrected(self, features: np.ndarray) -> np.ndarray:
        """Logs of the chances [...] of nodes with these features [..., X].

        -inf where a source gave a node no chance at all.
        """
        logits = self._logits(*_scaled(features))
        logs = -np.logaddexp(0, -logits)
        return np.where(np.isfinite(features[..., OWN]), logs, -np.inf)

    def gradient(self, features: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Of the nodes' summed negative log likelihood, by each of `weights`.

        Args:
            features: [n, X].
            right: [n] bool, which were accepted.
        """
        own, x = _scaled(features)
        _, _, inner, bias, outer = self._parts()
        hidden = np.tanh(x @ inner + bias)
        error = 1 / (1 + np.exp(-self._logits(own, x))) - right
        back = error[:, None] * outer * (1 - hidden**2)
        return np.concatenate(
            [
                x.T @ error,
                [error.sum()],
                (x.T @ back).ravel(),
                back.sum(axis=0),
                hidden.T @ error,
            ]
        )

    def observe(self, slot: int, features: np.ndarray, right: np.ndarray) -> None:
        """Learn from the tested nodes [n, X] of a request's step."""
        if not len(right):
            return
        rate = max(_LEAST_RATE, 1 / (_FIRST_STEPS + self._num_steps))
        self._num_steps += 1
        self._tested = True
        self.weights -= rate * self.gradient(features, right)
        np.clip(self.weights, -_MOST_WEIGHT, _MOST_WEIGHT, out=self.weights)
        self.guesses.observe(slot, right[features[:, RANK] == 0])

    def forgive(self) -> None:
        """A step begins; where no node was tested, back to the source's own chances."""
        if not self._tested:
            direct, offset, _, _, outer = self._parts()
            for part in (direct, offset, outer):
                part *= 1 - _FORGIVEN
        self._tested = False

    def learned(self) -> dict[str, Any]:
        """What `recall` takes, as JSON has it."""
        return {
            "features": list(FEATURES),
            "size": self.size,
            "weights": self.weights.tolist(),
            "steps": self._num_steps,
        }

    def recall(self, learned: dict[str, Any]) -> None:
        """Become another predictor.

        Raises:
            KeyError, TypeError, ValueError: This is not what `learned` returns.
        """
        refuse_unknown_keys(learned, _KEYS, "predictor")
        if learned["features"] != list(FEATURES):
            raise ValueError(
                f"features must be {', '.join(FEATURES)}; got {learned['features']}"
            )
        size, steps = learned["size"], learned["steps"]
        for name, value, most in (("size", size, MAX_SIZE), ("steps", steps, np.inf)):
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(
                    f"{name} must be an integer from 0 to {most}; got {value!r}"
                )
        num_weights = len(Predictor(size).weights)
        self.weights = finite(learned["weights"], (num_weights,))
        self.size, self._num_steps = size, steps

    def _logits(self, own: np.ndarray, x: np.ndarray) -> np.ndarray:
        direct, offset, inner, bias, outer = self._parts()
        return own + x @ direct + offset + np.tanh(x @ inner + bias) @ outer

    def _parts(self) -> list[np.ndarray]:
        """w, b, V, c and u as views."""
        n, h = len(FEATURES), self.size
        ends = np.cumsum([n, 1, n * h, h])
        direct, offset, inner, bias, outer = np.split(self.weights, ends)
        return [direct, offset, inner.reshape(n, h), bias, outer]


def read_predictor(file: Path) -> Predictor:
    """A predictor that `fit-scheduler` has written.

    Raises:
        ValueError: The file cannot be read, or holds something else.
    """
    predictor = Predictor()
    try:
        predictor.recall(json.loads(file.read_text())["predictor"])
    except (AttributeError, KeyError, TypeError, OSError, ValueError) as error:
        raise ValueError(
            f"scheduler.file must be what fit-scheduler has written; got "
            f"{str(file)!r}: {error!r}"
        ) from error
    return predictor


def _scaled(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The logit of the source's own chance [...], and what the perceptron sees."""
    logs = np.clip(features[..., OWN], _LEAST, _MOST)
    own = logs - np.log(-np.expm1(logs))
    x = features.copy()
    x[..., OWN] = own
    x[..., ABOVE] = np.maximum(x[..., ABOVE], _LEAST_ABOVE)
    return own, (x - _MIDDLE) / _SIZE
