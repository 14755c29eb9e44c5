"""Random numbers that are a pure function of (seed, position, token id): no state, no order of calls.

The draw for the token at one position is a race: every token of the vocabulary gets its own number, and a
caller may ask for the numbers of a few tokens only. So a replay, another batch, another device or a kernel
that visits the vocabulary in tiles draws the same tokens.

The definition, which a kernel has to repeat to draw the same tokens:

    key     = output number `position` (from 0) of SplitMix64 whose state starts at mix64(seed)
    uniform = tl.rand(key, token_id)                    Philox4x32-10, counter (token_id, 0, 0, 0)
    gumbel  = -log(-log1p(-max(uniform, 2**-32)))       in float64

The tail of a Gumbel that wins races is its upper one. It is taken from uniforms near 0, where float32 has its
full resolution (2**-31 here), and not from those near 1 (2**-24): with a vocabulary of 152k the coarse end
would make the two best of a flat distribution tie in about one draw out of a hundred. float64, so that two
devices whose logarithms differ in the last bit still agree on the winner.

Nothing here knows of logits or sampling settings. Sources: Salmon et al., "Parallel random numbers: as easy
as 1, 2, 3" (SC 2011); Steele et al., "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15

_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIER_0 = 0xD2511F53
_PHILOX_MULTIPLIER_1 = 0xCD9E8D57
_PHILOX_WEYL_0 = 0x9E3779B9
_PHILOX_WEYL_1 = 0xBB67AE85

# As in triton.language.random: just under 2**-31, so that the largest integer still gives less than 1.
_UNIFORM_SCALE = 4.6566127342e-10

# A uniform of 0 stands for [0, 2**-31): its middle is taken, and the logarithm stays finite.
_SMALLEST_UNIFORM = 2.0**-32

# No token's gumbel is larger: lets a caller rule tokens out without drawing for them.
GUMBEL_MAX = -math.log(-math.log1p(-_SMALLEST_UNIFORM))

# Elements worked on at a time: the dozen temporaries of Philox then stay in a core's cache.
_CHUNK = 16384


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


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random 32-bit words for each 128-bit counter under a 64-bit key.

    Words are int64 tensors of one shape that hold values in [0, 2**32), here and in the result: torch has no
    arithmetic for uint32, and the products need 64 bits anyway (they wrap, which keeps their bits).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key & _MASK32, (key >> 32) & _MASK32
    for _ in range(_PHILOX_ROUNDS):
        product0 = c0 * _PHILOX_MULTIPLIER_0
        product1 = c2 * _PHILOX_MULTIPLIER_1
        # c1 and c3 carry whole products; the mask drops their upper words, and the sign that >> spreads.
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK32)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK32)
        c1, c3 = product1, product0
        k0 = (k0 + _PHILOX_WEYL_0) & _MASK32
        k1 = (k1 + _PHILOX_WEYL_1) & _MASK32
    return c0, c1 & _MASK32, c2, c3 & _MASK32


def uniform(key: int, token_ids: Tensor) -> Tensor:
    """What `tl.rand(key, token_id)` gives for each id, bit by bit.

    Args:
        key: in [0, 2**64), from `mix_key`.
        token_ids: [N] int64 in [0, 2**32), any device, any order.

    Returns:
        [N] float32 in [0, 1), a new tensor.
    """
    result = torch.empty(token_ids.shape, dtype=torch.float32, device=token_ids.device)
    for start in range(0, token_ids.shape[0], _CHUNK):
        ids = token_ids[start : start + _CHUNK]
        zero = torch.zeros_like(ids)
        word = philox((ids, zero, zero, zero), key)[0]
        # Triton reads the word as int32 and folds the negative half onto the other: x < 0 becomes -x - 1.
        folded = torch.minimum(word, _MASK32 - word)
        torch.mul(folded.to(torch.float32), _UNIFORM_SCALE, out=result[start : start + _CHUNK])
    return result


def gumbel(key: int, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for each id: the argmax of log-weight + gumbel is a draw by weight.

    Args:
        key, token_ids: as for `uniform`.

    Returns:
        [N] float64, finite, at most GUMBEL_MAX; a new tensor.
    """
    u = uniform(key, token_ids).to(torch.float64).clamp_(min=_SMALLEST_UNIFORM)
    return u.neg_().log1p_().neg_().log_().neg_()
