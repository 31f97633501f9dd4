"""Drafting with the target's own randomness.

Tree verification draws a request's next token as the argmax of the target's scaled
logits plus noise of (seed, position, token). The SSM's logits with the same noise have
the same argmax whenever the two models agree well enough, so sampled requests draft the
best tokens of that sum: the tree guesses the draw, not only the distribution.

Dimension legend: F rows, V tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_specinfer.kernels.cpu.gumbel import gumbel_noise


@dataclass(frozen=True)
class DraftNoise:
    """What the noise of F rows depends on.

    Attributes:
        seeds: [F] int64 of the rows' requests.
        positions: [F] int64, where each row's token sits.
        temperatures: [F] float32, 0 for greedy requests.
    """

    seeds: np.ndarray
    positions: np.ndarray
    temperatures: np.ndarray

    def of(self, rows: np.ndarray, depth: int) -> "DraftNoise":
        """The noise of nodes `depth` below these rows, `rows` [F'] choosing among F."""
        return DraftNoise(
            self.seeds[rows], self.positions[rows] + depth, self.temperatures[rows]
        )

    def added_to(
        self, logits: torch.Tensor, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits by which sampled rows rank their children.

        Args:
            logits: [F, V] float32; may be changed.
            tokens: [V] token of each column; None where columns are tokens.

        Returns:
            [F, V] logits / temperature + noise; greedy rows as they were.
        """
        rows = np.flatnonzero(self.temperatures)
        if not len(rows):
            return logits
        columns = np.arange(logits.shape[1]) if tokens is None else tokens.numpy()
        drawn: dict[tuple[int, int], np.ndarray] = {}
        values = logits.numpy()
        for row in rows.tolist():
            key = int(self.seeds[row]), int(self.positions[row])
            if key not in drawn:
                drawn[key] = gumbel_noise(*key, columns)
            values[row] /= self.temperatures[row]
            values[row] += drawn[key]
        return logits
