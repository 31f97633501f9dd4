"""vLLM's own random numbers on the host, bit for bit.

The noise of (seed, position, token) is a Murmur3 hash turned into a Gumbel variate.
Every operation below keeps the order and the precision of the Triton original
(vllm/v1/worker/gpu/sample/gumbel.py).
"""

import numpy as np

# A draft's noise must be independent of the noise its verification draws.
DRAFT_NOISE_SALT = 1 << 30

_MASK = 0xFFFFFFFF
_HIGH_HALF_DOMAIN = 0x9E3779B9
_U = np.uint32


def _rotl(value: np.ndarray | int, shift: int) -> np.ndarray | int:
    return (value << shift) | (value >> (32 - shift))


def _scramble(key: int) -> int:
    key = (key * 0xCC9E2D51) & _MASK
    return (_rotl(key, 15) * 0x1B873593) & _MASK


def prefix(seed: int, pos: int, domain: int) -> int:
    """The hash state after seed and position, which a whole row shares."""
    state = domain
    for key in (seed, seed >> 32, pos):
        state ^= _scramble(key & _MASK)
        state = (_rotl(state, 13) & _MASK) * 5 + 0xE6546B64 & _MASK
    return state


def _hash32(
    seed: int | np.ndarray, pos: int | np.ndarray, tokens: np.ndarray, domain: int = 0
) -> np.ndarray:
    """Murmur3 of (seed, pos, token), uint32 as the tokens."""
    key = tokens.astype(_U)
    key *= _U(0xCC9E2D51)
    h = _rotl(key, 15)
    h *= _U(0x1B873593)
    if isinstance(seed, np.ndarray):
        pairs = zip(seed.tolist(), pos.tolist(), strict=True)
        h ^= np.array([prefix(*pair, domain) for pair in pairs], _U)[:, None]
    else:
        h ^= _U(prefix(seed, pos, domain))
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
    seed: int | np.ndarray,
    pos: int | np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """The noise that vLLM adds to the logits of ``tokens``.

    Args:
        seed: The request's 64-bit seed, or those of F rows, int64.
        pos: Position in the request, or [F] where there are F seeds; plus
            ``DRAFT_NOISE_SALT`` when drafting.
        tokens: Token ids [n], or [F, n].

    Returns:
        Noise, shaped as the tokens, float32.
    """
    random = _hash32(seed, pos, tokens)
    # Halves convert exactly; one conversion of the whole would round.
    high = (random >> 16).astype(np.float32)
    low = (random & 0xFFFF).astype(np.float32)
    u = high * np.float32(1.52587890625e-05) + (low + np.float32(0.5)) * np.float32(
        2.3283064365386963e-10
    )
    return -np.log(-_log1p_neg(u))


def uniform(
    seed: int | np.ndarray, pos: int | np.ndarray, counters: np.ndarray
) -> np.ndarray:
    """Uniform numbers between 0 and 1, both excluded, of (seed, pos, counter).

    Args:
        seed: A 64-bit seed, or those of F rows.
        pos: Position in the request, or [F] where there are F seeds; plus a multiple of
            ``DRAFT_NOISE_SALT`` for a stream of its own.
        counters: [n], or [F, n], non-negative, below 2**32.

    Returns:
        Shaped as the counters, float64.
    """
    random = _hash32(seed, pos, counters, _HIGH_HALF_DOMAIN).astype(np.uint64) << 32
    random |= _hash32(seed, pos, counters)
    u = ((random >> 11).astype(np.float64) + 0.5) * 1.1102230246251565e-16
    return np.where(u == 1.0, u - 1.1102230246251565e-16, u)


def _log1p_neg(value: np.ndarray) -> np.ndarray:
    """log(1 - value) by a series near zero, where the winning noise comes from."""
    polynomial: np.ndarray | np.float32 = np.float32(1.0 / 8.0)
    for n in (7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0):
        polynomial = np.float32(1.0 / n) + value * polynomial
    direct = np.log(np.maximum(np.float32(1.0) - value, np.float32(2**-24)))
    return np.where(value < np.float32(0.25), -value * polynomial, direct)
