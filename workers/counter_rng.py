"""Random numbers that are a pure function of (seed, position, token id): without state or order of calls.

A draw is an argmax over the vocabulary: each token has its own random number, and numbers can be computed for
a few tokens only. So a replay, another batch, another device or a kernel that processes the vocabulary in
tiles draws the same tokens.

The definition, which a kernel has to implement to draw the same tokens:

    key     = output number `position` (from 0) of SplitMix64 whose state starts at mix64(seed)
    uniform = tl.rand(key, token_id)                    Philox4x32-10, counter (token_id, 0, 0, 0)
    gumbel  = -log(-log1p(-max(uniform, 2**-32)))       in float64

The upper tail of the Gumbel distribution decides the argmax. It is computed from uniforms near 0, where
float32 has its full resolution (2**-31 here), and not from those near 1 (2**-24): with a vocabulary of 152k
the two best tokens of a flat distribution would tie in about one draw out of a hundred. In float64, two
devices whose logarithms differ in the last bit practically never draw different tokens.

numpy rather than torch: it has unsigned integers, and a call costs a third as much. Sources: Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3" (SC 2011); Steele et al., "Fast splittable pseudorandom number
generators" (OOPSLA 2014).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import philox as cpu

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIER_0 = 0xD2511F53
_PHILOX_MULTIPLIER_1 = 0xCD9E8D57
_PHILOX_WEYL_0 = 0x9E3779B9
_PHILOX_WEYL_1 = 0xBB67AE85

# As in triton.language.random: just under 2**-31, so that the largest integer still gives less than 1.
_UNIFORM_SCALE = np.float32(4.6566127342e-10)

# A uniform of 0 stands for [0, 2**-31). Its middle is used, so that the logarithm is finite.
_SMALLEST_UNIFORM = 2.0**-32

# The largest possible noise.
GUMBEL_MAX = -math.log(-math.log1p(-_SMALLEST_UNIFORM))

# Ids computed at once: the temporaries of Philox fit a core's second-level cache.
_IDS_AT_ONCE = 16384

Words = NDArray[np.uint64]


def mix64(value: int) -> int:
    """The finaliser of SplitMix64: a bijection of [0, 2**64) that flips about half of the bits."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def mix_key(seed: int, position: int) -> int:
    """The 64-bit key of all draws at `position` of the stream `seed` (both taken modulo 2**64).

    The seed is mixed before the position is added: otherwise the streams of neighbouring seeds could be one
    stream, shifted. For one seed, different positions have different keys.
    """
    return mix64(mix64(seed) + (position + 1) * _SPLITMIX_GAMMA)


def mix_keys(streams: Words, positions: NDArray[np.int64]) -> Words:
    """As `mix_key`, of several draws: [N]. `streams`: [N], `mix64` of each seed."""
    words = streams + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_SPLITMIX_GAMMA)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    keys: Words = words ^ (words >> np.uint64(31))
    return keys


def philox(counter: tuple[Words, Words, Words, Words], key: int) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four random 32-bit words for each 128-bit counter under a 64-bit key.

    Words are [N] uint64 below 2**32, here and in the result, because the products need 64 bits. `counter` is
    not modified.
    """
    c0, c1, c2, c3 = (words.copy() for words in counter)
    high = np.empty_like(c0)
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(_PHILOX_ROUNDS):
        np.multiply(c0, _PHILOX_MULTIPLIER_0, out=c0)
        np.multiply(c2, _PHILOX_MULTIPLIER_1, out=c2)
        _next_word(c1, np.right_shift(c2, 32, out=high), k0)
        _next_word(c3, np.right_shift(c0, 32, out=high), k1)
        # c1 and c3 carry whole products from here on; the mask of the next round drops their upper words.
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0 = (k0 + _PHILOX_WEYL_0) & _MASK32
        k1 = (k1 + _PHILOX_WEYL_1) & _MASK32
    np.bitwise_and(c1, _MASK32, out=c1)
    np.bitwise_and(c3, _MASK32, out=c3)
    return c0, c1, c2, c3


def _next_word(word: Words, high: Words, round_key: int) -> None:
    np.bitwise_xor(word, high, out=word)
    np.bitwise_xor(word, round_key, out=word)
    np.bitwise_and(word, _MASK32, out=word)


def uniform(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """The value of `tl.rand(key, token_id)` for each id, bit by bit.

    Args:
        key: in [0, 2**64), from `mix_key`.
        token_ids: [N], each in [0, 2**32), in any order.

    Returns:
        [N], each in [0, 1); a new array.
    """
    if cpu.can_uniform():
        return cpu.uniform(key, token_ids)
    return uniform_reference(key, token_ids)


def uniform_reference(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """`uniform` in numpy, which takes about 30 times as long as compiled code."""
    result = np.empty(token_ids.shape, dtype=np.float32)
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        ids = token_ids[start : start + _IDS_AT_ONCE].astype(np.uint64)
        zero = np.zeros_like(ids)
        word = philox((ids, zero, zero, zero), key)[0]
        # Triton reads the word as int32 and folds the negative half onto the other: x < 0 becomes -x - 1.
        folded = np.minimum(word, _MASK32 - word).view(np.int64).astype(np.float32)
        result[start : start + _IDS_AT_ONCE] = folded * _UNIFORM_SCALE
    return result


def gumbel(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for each id: the argmax of log-weight + gumbel is a draw by weight.

    Args:
        key, token_ids: as for `uniform`.

    Returns:
        [N], finite, at most GUMBEL_MAX; a new array.
    """
    u = np.maximum(uniform(key, token_ids).astype(np.float64), _SMALLEST_UNIFORM)
    return -np.log(-np.log1p(-u))
