"""Gumbel-max sampling with vLLM's own noise, bit for bit.

The noise of (seed, position, token) is a Murmur3 hash turned into a Gumbel variate.
It is bounded, so only tokens within a fixed distance of the best logit can win; a C++
kernel (`gumbel.cpp`) finds the few that their hash lets win, which makes a draw cheap
without a GPU.
Every operation below keeps the order and the precision of the Triton original.

L logit rows, V vocabulary, M request rows.
"""

import numpy as np

from vllm_specinfer.kernels.cpu import extension

# A draft's noise must be independent of the noise its verification draws.
DRAFT_NOISE_SALT = 1 << 30
# 53-bit and 32-bit uniforms are at least 2**-54 and 2**-33: -log of it bounds the
# noise from above; the excess covers rounding.
MAX_NOISE_FP32 = 22.9
MAX_NOISE_FP64 = 37.5

_MASK = 0xFFFFFFFF
_HIGH_HALF_DOMAIN = 0x9E3779B9
_U = np.uint32


def _rotl(value: np.ndarray | int, shift: int) -> np.ndarray | int:
    return (value << shift) | (value >> (32 - shift))


def _scramble(key: int) -> int:
    key = (key * 0xCC9E2D51) & _MASK
    return (_rotl(key, 15) * 0x1B873593) & _MASK


def _prefix(seed: int, pos: int, domain: int) -> int:
    """The hash state after seed and position, which a whole row shares."""
    state = domain
    for key in (seed, seed >> 32, pos):
        state ^= _scramble(key & _MASK)
        state = (_rotl(state, 13) & _MASK) * 5 + 0xE6546B64 & _MASK
    return state


def _hash32(seed: int, pos: int, tokens: np.ndarray, domain: int = 0) -> np.ndarray:
    """Murmur3 of (seed, pos, token), uint32 [n]."""
    key = tokens.astype(_U)
    key *= _U(0xCC9E2D51)
    h = _rotl(key, 15)
    h *= _U(0x1B873593)
    h ^= _U(_prefix(seed, pos, domain))
    h = _rotl(h, 13)
    h *= _U(5)
    h += _U(0xE6546B64)
    h ^= _U(16)
    h ^= h >> 16
    h *= _U(0x85EBCA6B)
    h ^= h >> 13
    h *= _U(0xC2B2AE35)
    h ^= h >> 16
    return h


def gumbel_noise(
    seed: int, pos: int, tokens: np.ndarray, use_fp64: bool = False
) -> np.ndarray:
    """The noise that vLLM adds to the logits of ``tokens``.

    Args:
        seed: The request's 64-bit seed.
        pos: Position in the request, plus ``DRAFT_NOISE_SALT`` when drafting.
        tokens: Token ids [n].
        use_fp64: Draw 53-bit uniforms instead of 32-bit ones.

    Returns:
        Noise [n], float64 or float32.
    """
    u = _uniform(seed, pos, tokens, use_fp64)
    return -np.log(-np.log(u)) if use_fp64 else -np.log(-_log1p_neg(u))


def uniform(seed: int, pos: int, counters: np.ndarray) -> np.ndarray:
    """Uniform numbers between 0 and 1, both excluded, of (seed, pos, counter).

    Args:
        seed: A 64-bit seed.
        pos: Position in the request, plus a multiple of ``DRAFT_NOISE_SALT`` for a
            stream of its own.
        counters: [n] non-negative, below 2**32.

    Returns:
        [n] float64.
    """
    return _uniform(seed, pos, counters, use_fp64=True)


def _uniform(seed: int, pos: int, tokens: np.ndarray, use_fp64: bool) -> np.ndarray:
    if use_fp64:
        random = _hash32(seed, pos, tokens, _HIGH_HALF_DOMAIN).astype(np.uint64) << 32
        random |= _hash32(seed, pos, tokens)
        u = ((random >> 11).astype(np.float64) + 0.5) * 1.1102230246251565e-16
        return np.where(u == 1.0, u - 1.1102230246251565e-16, u)
    random = _hash32(seed, pos, tokens)
    # Halves convert exactly; one conversion of the whole would round.
    high = (random >> 16).astype(np.float32)
    low = (random & 0xFFFF).astype(np.float32)
    return high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(
        2.3283064365386963e-10
    )


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """log(1 - value) by a series near zero, where the winning noise comes from."""
    polynomial: np.ndarray | np.float32 = np.float32(1.0 / 8.0)
    for n in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        polynomial = np.float32(1.0 / n) + value * polynomial
    direct = np.log(np.maximum(np.float32(1.0) - value, np.float32(2**-24)))
    return np.where(value < np.float32(0.25), -value * polynomial, direct)


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
    bound = top + gumbel_noise(seed, pos, np.array([best]), use_fp64)
    kernels = None if use_fp64 else extension.load()
    if kernels is not None:
        prefix = _prefix(seed, pos, 0)
        tokens = kernels.gumbel_contenders(logits, bound[0], MAX_NOISE_FP32, prefix)
    else:
        limit = MAX_NOISE_FP64 if use_fp64 else MAX_NOISE_FP32
        tokens = np.flatnonzero(logits > bound - limit)
    values = logits[tokens] + gumbel_noise(seed, pos, tokens, use_fp64)
    winner = int(values.argmax())
    return int(tokens[winner]), float(values[winner])
