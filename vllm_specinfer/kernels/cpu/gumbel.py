"""Gumbel-max sampling with vLLM's own noise.

The noise is bounded, so only tokens within a fixed distance of the best logit can win;
a C++ kernel (`gumbel.cpp`) finds the few that their hash lets win, which makes a draw
cheap without a GPU.

L rows, V vocabulary.
"""

import numpy as np

from vllm_specinfer import noise
from vllm_specinfer.kernels.cpu import extension

# 32-bit uniforms are at least 2**-33: -log of it bounds the noise from above; the rest
# covers rounding.
MAX_NOISE = 22.9


def noised_argmax(
    logits: np.ndarray,
    temperatures: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Winners of logits / temperature + noise.

    Args:
        logits: [L, V] float32.
        temperatures: [L] float32; rows at 0 have no noise.
        seeds: [L] int64.
        positions: [L] int64.

    Returns:
        Tokens [L] and their values [L]; ties go to the lowest id.
    """
    best = logits.argmax(axis=-1)
    kernels = extension.load()
    if kernels is not None:
        return kernels.gumbel_argmax(
            logits, best, temperatures, seeds, positions, MAX_NOISE
        )
    values, tokens = logits[np.arange(len(logits)), best], np.arange(logits.shape[1])
    for i in np.flatnonzero(temperatures).tolist():
        row = logits[i] / temperatures[i]
        row += noise.gumbel_noise(int(seeds[i]), int(positions[i]), tokens)
        best[i] = row.argmax()
        values[i] = row[best[i]]
    return best, values
