"""Rows of a journal as bytes: a stand-in for the real encoding, with the interface that it is to have."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator, Sequence
from zlib import crc32

from service.caches.records import Record

_HEAD = struct.Struct("<II")
_KEY = struct.Struct("<Qq")


class CorruptRecord(Exception):
    """Bytes that are not what was encoded."""


def encode(records: Sequence[Record]) -> bytes:
    """The frames of records."""
    frames = (pickle.dumps(record, pickle.HIGHEST_PROTOCOL) for record in records)
    return b"".join(_HEAD.pack(len(frame), crc32(frame)) + frame for frame in frames)


def seal(frames: Sequence[bytes], seq: int, wall_ns: int) -> bytes:
    """A row of what `encode` returned, once or more often."""
    body = b"".join(frames)
    return _HEAD.pack(len(body), crc32(_KEY.pack(seq, wall_ns))) + body


def decode(row: bytes, seq: int, wall_ns: int) -> Iterator[Record]:
    """The records of a row, one by one. Raises CorruptRecord, maybe after some records."""
    _check_head(row, seq, wall_ns)
    at = _HEAD.size
    while at < len(row):
        if len(row) < at + _HEAD.size:
            raise CorruptRecord
        length, checksum = _HEAD.unpack_from(row, at)
        at += _HEAD.size + length
        frame = row[at - length : at]
        if len(frame) != length or crc32(frame) != checksum:
            raise CorruptRecord
        yield pickle.loads(frame)


def _check_head(row: bytes, seq: int, wall_ns: int) -> None:
    if len(row) < _HEAD.size:
        raise CorruptRecord
    if _HEAD.unpack_from(row) != (len(row) - _HEAD.size, crc32(_KEY.pack(seq, wall_ns))):
        raise CorruptRecord
