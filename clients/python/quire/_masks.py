"""Masks of tokens in few bytes that are cheap to find."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from quire.v1 import types_pb2

# A packed mask as TokenMask has it, the ids that are allowed, or a mask that is sent as it is.
Allowed: TypeAlias = bytes | Iterable[int] | types_pb2.TokenMask

# Smaller ones are sent as they are.
_SMALL_BYTES = 64
# So many tokens are listed at most. An id takes up to three bytes; more of them deflate as well.
_MOST_LISTED = 128
# Of an array that says nothing but ids: numpy's and torch's own integers.
_ID_BYTES = 8
# Bits behind the vocabulary mean nothing. How large that is, nobody says here: they may be those of a word.
_UNSURE_BYTES = 4
_SOME_BITS = re.compile(rb"[^\0]")


def token_mask(allowed: Allowed) -> types_pb2.TokenMask:
    """The tokens that may be chosen: a packed mask, one bit for each token, or their ids.

    A packed mask is bytes. Of an array of words, as libraries of grammars fill them, pass `row.tobytes()` (in
    torch `row.numpy().tobytes()`): from an array alone nobody sees whether its numbers are words or ids. One
    of 64-bit integers is ids.

    A packed mask is sent in the smallest form that is cheap to find: where few tokens are allowed, as a list
    of these; else deflated, if that is smaller. To send one as it is, pass `TokenMask(packed=...)`.

    Raises:
        TypeError: An array of smaller elements than those, or of more than one dimension.
    """
    if isinstance(allowed, types_pb2.TokenMask):
        return allowed
    if not isinstance(allowed, bytes | bytearray | memoryview):
        # Duck typing: neither numpy nor torch is needed here. A mask that is read as ids would be believed.
        if getattr(allowed, "itemsize", _ID_BYTES) != _ID_BYTES or getattr(allowed, "ndim", 1) != 1:
            raise TypeError("is this array a packed mask, or ids? Pass row.tobytes(), or ids.tolist()")
        return types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=allowed))
    packed = bytes(allowed)
    return types_pb2.TokenMask(packed=packed) if len(packed) <= _SMALL_BYTES else _smallest(packed)


def _smallest(packed: bytes) -> types_pb2.TokenMask:
    # A list names tokens only: where the last word could say something else, there is none.
    count = int.from_bytes(packed, "little").bit_count()
    if 0 < count <= _MOST_LISTED and not any(packed[-_UNSURE_BYTES:]):
        return types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=_set_bits(packed)))
    # Never as a list of what is forbidden. Of a mask that was made for fewer tokens than the model has, this
    # would allow the others; deflated it is refused, as it is packed.
    deflated = zlib.compress(packed, 1)
    if len(deflated) < len(packed):
        return types_pb2.TokenMask(deflated=deflated)
    return types_pb2.TokenMask(packed=packed)


def _set_bits(packed: bytes) -> Iterator[int]:
    for found in _SOME_BITS.finditer(packed):
        byte = found[0][0]
        yield from (8 * found.start() + bit for bit in range(8) if byte >> bit & 1)
