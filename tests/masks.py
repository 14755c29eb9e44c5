"""The same set of tokens in every form that a TokenMask has."""

from __future__ import annotations

import zlib

from quire.v1 import types_pb2


def forms(
    allowed: set[int], vocab_size: int, stray_bits: int = 0, *, words: bool = False
) -> list[types_pb2.TokenMask]:
    """One mask of each kind. `stray_bits`: what stands behind the vocabulary, where there is room for it.

    `words`: bits fill words of 32.
    """
    size = (vocab_size + 31) // 32 * 4 if words else (vocab_size + 7) // 8
    bits = sum(1 << token for token in allowed) | stray_bits << vocab_size
    packed = (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    forbidden = set(range(vocab_size)) - allowed
    return [
        types_pb2.TokenMask(packed=packed),
        types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=allowed)),
        types_pb2.TokenMask(deflated=zlib.compress(packed)),
        types_pb2.TokenMask(forbidden=types_pb2.TokenIds(ids=forbidden)),
    ]
