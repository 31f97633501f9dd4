"""Gumbel-max sampling with vLLM's own noise, bit for bit.

The noise is bounded, so only tokens within a fixed distance of the best logit can win;
a C++ kernel (`gumbel.cpp`) finds the few that their hash lets win, which makes a draw
cheap without a GPU.

V vocabulary.
"""

import numpy as np

from vllm_specinfer import noise
from vllm_specinfer.kernels.cpu import extension

# 53-bit and 32-bit uniforms are at least 2**-54 and 2**-33: -log of it bounds the
# noise from above; the excess covers rounding.
MAX_NOISE_FP32 = 22.9
MAX_NOISE_FP64 = 37.5


def noised_argmax(
    logits: np.ndarray, seed: int, pos: int, use_fp64: bool = False
) -> tuple[int, float]:
    """Winner of logits + noise and its value; ``logits`` [V] float32, scaled."""
    best = int(logits.argmax())
    top = logits[best : best + 1]
    if not np.isfinite(top[0]):
        return best, float(top[0])
    if use_fp64:
        logits = logits.astype(np.float64)
        top = logits[best : best + 1]
    bound = top + noise.gumbel_noise(seed, pos, np.array([best]), use_fp64)
    kernels = None if use_fp64 else extension.load()
    if kernels is not None:
        prefix = noise.prefix(seed, pos, 0)
        tokens = kernels.gumbel_contenders(logits, bound[0], MAX_NOISE_FP32, prefix)
    else:
        limit = MAX_NOISE_FP64 if use_fp64 else MAX_NOISE_FP32
        tokens = np.flatnonzero(logits > bound - limit)
    values = logits[tokens] + noise.gumbel_noise(seed, pos, tokens, use_fp64)
    winner = int(values.argmax())
    return int(tokens[winner]), float(values[winner])
