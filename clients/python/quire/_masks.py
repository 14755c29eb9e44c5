"""Encodes token masks in few bytes, at a low CPU cost."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from quire.v1 import types_pb2

# A packed mask as in TokenMask, the allowed ids, or a TokenMask that is sent unchanged.
Allowed: TypeAlias = bytes | Iterable[int] | types_pb2.TokenMask

# Masks of at most this size are not compressed.
_MIN_COMPRESSED_BYTES = 64
# The maximum length of a list of ids. An id takes up to three bytes; longer lists deflate to a similar size.
_MAX_LISTED_IDS = 128
# The element size of an array that can only hold ids: the default integers of numpy and torch.
_ID_BYTES = 8
# Bits beyond the vocabulary, whose size is unknown here, may be padding of a word of this size.
_MAX_PADDING_BYTES = 4
_NONZERO_BYTE = re.compile(rb"[^\0]")


def token_mask(allowed: Allowed) -> types_pb2.TokenMask:
    """The tokens that may be chosen: a packed mask, one bit for each token, or their ids.

    A packed mask is bytes. For an array of words, as grammar libraries fill it, pass `row.tobytes()` (in
    torch `row.numpy().tobytes()`): an array does not show whether its numbers are words or ids. An array of
    64-bit integers is treated as ids.

    A packed mask is sent as a list of ids if few tokens are allowed; otherwise deflated, if that is smaller.
    To send it unchanged, pass `TokenMask(packed=...)`.

    Raises:
        TypeError: `allowed` is an array of smaller elements, or of more than one dimension.
    """
    if isinstance(allowed, types_pb2.TokenMask):
        return allowed
    if not isinstance(allowed, bytes | bytearray | memoryview):
        # Duck typing, because neither numpy nor torch is a dependency. Words that are taken for ids would
        # not be noticed.
        if getattr(allowed, "itemsize", _ID_BYTES) != _ID_BYTES or getattr(allowed, "ndim", 1) != 1:
            raise TypeError("is this array a packed mask, or ids? Pass row.tobytes(), or ids.tolist()")
        return types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=allowed))
    packed = bytes(allowed)
    return types_pb2.TokenMask(packed=packed) if len(packed) <= _MIN_COMPRESSED_BYTES else _compressed(packed)


def _compressed(packed: bytes) -> types_pb2.TokenMask:
    # A list may contain only tokens of the vocabulary, so it is not used if the last word has bits set.
    count = int.from_bytes(packed, "little").bit_count()
    if 0 < count <= _MAX_LISTED_IDS and not any(packed[-_MAX_PADDING_BYTES:]):
        return types_pb2.TokenMask(allowed=types_pb2.TokenIds(ids=_set_bits(packed)))
    # Not as a list of forbidden ids: if the mask is shorter than the vocabulary, that would allow the other
    # tokens, while the server refuses a packed or deflated mask that is too short.
    deflated = zlib.compress(packed, 1)
    if len(deflated) < len(packed):
        return types_pb2.TokenMask(deflated=deflated)
    return types_pb2.TokenMask(packed=packed)


def _set_bits(packed: bytes) -> Iterator[int]:
    for found in _NONZERO_BYTE.finditer(packed):
        byte = found[0][0]
        yield from (8 * found.start() + bit for bit in range(8) if byte >> bit & 1)
