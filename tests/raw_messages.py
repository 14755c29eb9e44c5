"""Messages of protobuf written by hand, as no library would write them."""

from __future__ import annotations


def packed(field: int, body: bytes) -> bytes:
    """A field of bytes, of a message, or of numbers of one byte each."""
    size, length = len(body), bytearray()
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + body
