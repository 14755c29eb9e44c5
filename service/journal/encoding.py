"""Encodes records as bytes, and decodes them.

A row holds the records of one or more commits:

    row     version u8, 0 u8, 0 u16, length of the frames u32, crc32 u32, frames
    frame   length of the body u32, kind u8, body, crc32 u32

All values are little-endian. The crc of a row covers the bytes before it and the row's number and time, which
are stored beside the row. The crc of a frame covers the bytes before it in the frame. A frame holds one
record, or packed decodes: a run of appends of one token each, of any caches, with 20 bytes an append.

A record that creates a cache ends with the numbers of its weights and its adapter; zeros at its end are left
out. There is a kind for each number of these. Earlier versions used the same kind with and without weights,
which can still be read.

A program that does not know the format of a row must refuse the journal. It must not treat the row as a
damaged one, since a damaged last row is dropped.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheRestated,
    CacheTruncated,
    Child,
    ForkKey,
    LastAppend,
    LeaseRenewed,
    Record,
    TokensAppended,
)

# The newest format. A row has the oldest format that has all its kinds, so that older programs can read it.
VERSION: Final = 4
_FIRST_VERSION: Final = 1
_TOKEN_BYTES: Final = 4
_ROW_HEAD = struct.Struct("<BBHI")
_ROW_KEY = struct.Struct("<Qq")
_FRAME_HEAD = struct.Struct("<IB")
_CRC = struct.Struct("<I")
_ROW_START: Final = _ROW_HEAD.size + _CRC.size
FRAME_BYTES: Final = _FRAME_HEAD.size + _CRC.size

_CREATED, _APPENDED, _TRUNCATED, _FORKED, _RENEWED, _RELEASED, _RESTATED, _PACKED_DECODES = range(1, 9)
# A fork of one of several parents in a request; caches with weights other than 0; caches with an adapter.
_FORKED_TOGETHER, _CREATED_WITH_WEIGHTS, _RESTATED_WITH_WEIGHTS = range(9, 12)
_CREATED_WITH_ADAPTER, _RESTATED_WITH_ADAPTER = range(12, 14)
# The first format that has a kind, if that is not the first of all.
_FORMATS: Final = {
    _FORKED_TOGETHER: 2,
    _CREATED_WITH_WEIGHTS: 3,
    _RESTATED_WITH_WEIGHTS: 3,
    _CREATED_WITH_ADAPTER: 4,
    _RESTATED_WITH_ADAPTER: 4,
}

_U8, _U32, _U64, _F64 = map(struct.Struct, ("<B", "<I", "<Q", "<d"))
# Number, position, prompt_len, ownership and token, each an u32.
PACKED_DECODE_BYTES: Final = 20
_PACKED_DECODE_VALUES: Final = PACKED_DECODE_BYTES // _TOKEN_BYTES


class CorruptRecord(Exception):
    """Damaged bytes. The message names the offset in the row and the damage."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"byte {at}: {what}")


class NewerFormat(CorruptRecord):
    """A row of a newer version of this program."""


def encode(records: Sequence[Record]) -> bytes:
    """Encodes records as frames. Raises ValueError if a value is out of its range."""
    frames: list[bytes] = []
    packed_values: list[int] = []
    packed_records: list[TokensAppended] = []
    for record in records:
        if (
            type(record) is TokensAppended
            and len(record.token_ids) == 1
            and not record.accept
            and not record.asked
        ):
            packed_values += (record.number, record.position, record.prompt_len, record.ownership)
            packed_values += record.token_ids
            packed_records.append(record)
            continue
        if packed_values:
            frames += _encode_decodes(packed_values, packed_records)
            packed_values, packed_records = [], []
        frames.append(_encode_one(record))
    if packed_values:
        frames += _encode_decodes(packed_values, packed_records)
    return frames[0] if len(frames) == 1 else b"".join(frames)


def seal(commits: Sequence[bytes], seq: int, wall_ns: int) -> bytes:
    """Makes a row of results of `encode`. Its crc includes `seq` and `wall_ns`."""
    version = _FIRST_VERSION
    for frames in commits:
        at = 0
        while at < len(frames):
            length, kind = _FRAME_HEAD.unpack_from(frames, at)
            if kind in _FORMATS:
                version = max(version, _FORMATS[kind])
            at += FRAME_BYTES + length
    head = _ROW_HEAD.pack(version, 0, 0, sum(map(len, commits)))
    return b"".join((head, _CRC.pack(crc32(head, crc32(_ROW_KEY.pack(seq, wall_ns)))), *commits))


def decode(row: bytes, seq: int, wall_ns: int) -> Iterator[Record]:
    """Yields the records of a row. Raises CorruptRecord, maybe after some records."""
    for item in decode_packed(row, seq, wall_ns):
        if not isinstance(item, bytes):
            yield item
            continue
        values = _array_of(item)
        for at in range(0, len(values), _PACKED_DECODE_VALUES):
            number, position, prompt_len, ownership, _ = values[at : at + _PACKED_DECODE_VALUES]
            yield TokensAppended(number, position, values[at + 4 : at + 5], prompt_len, ownership)


def decode_packed(row: bytes, seq: int, wall_ns: int) -> Iterator[Record | bytes]:
    """As `decode`, but leaves packed decodes packed: `PACKED_DECODE_BYTES` for each append of one token."""
    _check_head(row, seq, wall_ns)
    view, at = memoryview(row), _ROW_START
    while at < len(row):
        if at + FRAME_BYTES > len(row):
            raise CorruptRecord(at, "a frame is truncated")
        length, kind = _FRAME_HEAD.unpack_from(row, at)
        body, end = at + _FRAME_HEAD.size, at + _FRAME_HEAD.size + length
        if end + _CRC.size > len(row):
            raise CorruptRecord(at, "a frame is longer than its row")
        if crc32(view[at:end]) != _CRC.unpack_from(row, end)[0]:
            raise CorruptRecord(at, "the checksum of a record differs")
        if kind == _PACKED_DECODES:
            if length % PACKED_DECODE_BYTES:
                raise CorruptRecord(at, "packed decodes are truncated")
            yield row[body:end]
        else:
            yield _decode_one(row, kind, body, end)
        at = end + _CRC.size


def _check_head(row: bytes, seq: int, wall_ns: int) -> None:
    if len(row) < _ROW_START:
        raise CorruptRecord(0, f"a row of {len(row)} bytes")
    version, *zeros, length = _ROW_HEAD.unpack_from(row)
    if crc32(row[: _ROW_HEAD.size], crc32(_ROW_KEY.pack(seq, wall_ns))) != _CRC.unpack_from(row, 8)[0]:
        raise CorruptRecord(0, "the checksum of the row's head differs")
    if version > VERSION:
        raise NewerFormat(0, f"format {version}, and this program knows {VERSION} at most")
    if not version or any(zeros) or length != len(row) - _ROW_START:
        raise CorruptRecord(0, f"{len(row) - _ROW_START} bytes follow the row's head instead of {length}")


def _frame(kind: int, body: bytes) -> bytes:
    frame = _FRAME_HEAD.pack(len(body), kind) + body
    return frame + _CRC.pack(crc32(frame))


def _encode_decodes(values: list[int], records: list[TokensAppended]) -> list[bytes]:
    try:
        packed = array("I", values)
    except OverflowError:
        # A value needs more than 32 bits, for which other records have room.
        return [_encode_one(record) for record in records]
    if sys.byteorder == "big":
        packed.byteswap()
    return [_frame(_PACKED_DECODES, packed.tobytes())]


def _encode_one(record: Record) -> bytes:
    kind = _KINDS[type(record)]
    if isinstance(record, CacheForked) and record.total:
        kind = _FORKED_TOGETHER
    elif isinstance(record, CacheCreated | CacheRestated) and record.adapter:
        kind = _CREATED_WITH_ADAPTER if kind == _CREATED else _RESTATED_WITH_ADAPTER
    elif isinstance(record, CacheCreated | CacheRestated) and record.weights:
        kind = _CREATED_WITH_WEIGHTS if kind == _CREATED else _RESTATED_WITH_WEIGHTS
    try:
        return _frame(kind, _LAYOUTS[kind].write(record))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{type(record).__name__} of a cache does not fit its encoding: {error}") from None


def _packed(values: array[int]) -> bytes:
    """Little-endian bytes. May change `values`."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _array_of(packed: bytes) -> array[int]:
    values = array("I", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _decode_one(row: bytes, kind: int, at: int, end: int) -> Record:
    if kind not in _LAYOUTS:
        raise CorruptRecord(at, f"records of kind {kind} are unknown")
    body = _Body(row, at, end)
    record: Record = _LAYOUTS[kind].read(body)
    if body.left:
        raise CorruptRecord(end - body.left, "a record has extra bytes")
    return record


# How the fields of records are encoded.


class _Body:
    """Reads the body of a frame, never beyond its end."""

    def __init__(self, row: bytes, at: int, end: int) -> None:
        self._row = row
        self._at = at
        self.left = end - at

    def take(self, size: int) -> bytes:
        start = self._at
        if size > self.left:
            raise CorruptRecord(start, "a record is truncated")
        self._at += size
        self.left -= size
        return self._row[start : self._at]

    def blob(self) -> bytes:
        return self.take(*_U32.unpack(self.take(_U32.size)))

    def text(self) -> str:
        at = self._at
        try:
            return self.blob().decode()
        except UnicodeDecodeError:
            raise CorruptRecord(at, "a text is not UTF-8") from None

    def tokens(self) -> array[int]:
        at, packed = self._at, self.blob()
        if len(packed) % _TOKEN_BYTES:
            raise CorruptRecord(at, "tokens are truncated")
        return _array_of(packed)


class _Codec(NamedTuple):
    """Writes and reads one value."""

    write: Callable[[Any], bytes]
    read: Callable[[_Body], Any]


def _value(layout: struct.Struct) -> _Codec:
    return _Codec(layout.pack, lambda body: layout.unpack(body.take(layout.size))[0])


def _write_blob(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


_INT, _FLOAT = _value(_U64), _value(_F64)
_BLOB = _Codec(_write_blob, _Body.blob)
_TEXT = _Codec(lambda text: _write_blob(text.encode()), _Body.text)
_TOKENS = _Codec(lambda token_ids: _write_blob(_packed(array("I", token_ids))), _Body.tokens)
# At the end of a record. 0 is not written.
_WEIGHTS = _Codec(lambda weights: _INT.write(weights) if weights else b"", lambda b: b.left and _INT.read(b))


class _Layout:
    """The fields of a dataclass, in the order in which they are written.

    A field that can be None occurs twice: `_IS_SET`, and later its value, if it has one.
    """

    def __init__(self, cls: Callable[..., Any], *fields: tuple[str, _Codec]) -> None:
        self._cls = cls
        self._fields = fields

    def write(self, value: object) -> bytes:
        return b"".join([codec.write(getattr(value, name)) for name, codec in self._fields])

    def read(self, body: _Body) -> Any:
        values: dict[str, Any] = {}
        for name, codec in self._fields:
            values[name] = codec.read(body) if values.get(name, True) else None
        return self._cls(**values)


def _if_set(layout: _Layout) -> _Codec:
    return _Codec(lambda value: b"" if value is None else layout.write(value), layout.read)


def _list_of(layout: _Layout) -> _Codec:
    def write(items: Sequence[object]) -> bytes:
        return _U32.pack(len(items)) + b"".join(map(layout.write, items))

    def read(body: _Body) -> list[Any]:
        # A wrong count fails at the end of the body.
        return [layout.read(body) for _ in range(*_U32.unpack(body.take(_U32.size)))]

    return _Codec(write, read)


_IS_SET = _Codec(lambda value: _U8.pack(value is not None), _value(_U8).read)
_CHILDREN = _list_of(_Layout(Child, ("number", _INT), ("seed", _INT), ("cache_id", _TEXT)))
_LAST = _if_set(_Layout(LastAppend, ("base", _INT), ("kept", _INT), ("accept", _INT), ("asked", _BLOB)))
_FORK = _if_set(_Layout(ForkKey, ("parent", _INT), ("index", _INT), ("count", _INT), ("request_id", _TEXT)))
_FORK_FIELDS = (("parent", _INT), ("request_id", _TEXT), ("children", _CHILDREN))
_CREATED_FIELDS = (
    ("number", _INT),
    ("seed", _INT),
    ("lease_s", _FLOAT),
    ("cache_id", _TEXT),
    ("tenant", _TEXT),
    ("request_id", _TEXT),
    ("salt", _BLOB),
)
_RESTATED_FIELDS = (
    ("number", _INT),
    ("seed", _INT),
    ("lease_s", _FLOAT),
    ("prompt_len", _INT),
    ("ownership", _INT),
    ("shares_with", _INT),
    ("shared_len", _INT),
    ("last", _IS_SET),
    ("fork", _IS_SET),
    ("cache_id", _TEXT),
    ("tenant", _TEXT),
    ("request_id", _TEXT),
    ("salt", _BLOB),
    ("last", _LAST),
    ("fork", _FORK),
    ("token_ids", _TOKENS),
)
_WITH_ADAPTER = (("weights", _INT), ("adapter", _INT))
_CREATED_LAYOUT = _Layout(CacheCreated, *_CREATED_FIELDS, ("weights", _WEIGHTS))
_RESTATED_LAYOUT = _Layout(CacheRestated, *_RESTATED_FIELDS, ("weights", _WEIGHTS))
_LAYOUTS: Final = {
    _CREATED: _CREATED_LAYOUT,
    _CREATED_WITH_WEIGHTS: _CREATED_LAYOUT,
    _CREATED_WITH_ADAPTER: _Layout(CacheCreated, *_CREATED_FIELDS, *_WITH_ADAPTER),
    _APPENDED: _Layout(
        TokensAppended,
        ("number", _INT),
        ("position", _INT),
        ("prompt_len", _INT),
        ("ownership", _INT),
        ("accept", _INT),
        ("asked", _BLOB),
        ("token_ids", _TOKENS),
    ),
    _TRUNCATED: _Layout(CacheTruncated, ("number", _INT), ("new_len", _INT)),
    _FORKED: _Layout(CacheForked, *_FORK_FIELDS),
    _FORKED_TOGETHER: _Layout(CacheForked, *_FORK_FIELDS, ("total", _INT), ("first", _INT)),
    _RENEWED: _Layout(LeaseRenewed, ("number", _INT), ("lease_s", _FLOAT)),
    _RELEASED: _Layout(CacheReleased, ("number", _INT)),
    _RESTATED: _RESTATED_LAYOUT,
    _RESTATED_WITH_WEIGHTS: _RESTATED_LAYOUT,
    _RESTATED_WITH_ADAPTER: _Layout(CacheRestated, *_RESTATED_FIELDS, *_WITH_ADAPTER),
}
# The oldest kind of each record.
_KINDS: Final[dict[type, int]] = {
    CacheCreated: _CREATED,
    TokensAppended: _APPENDED,
    CacheTruncated: _TRUNCATED,
    CacheForked: _FORKED,
    LeaseRenewed: _RENEWED,
    CacheReleased: _RELEASED,
    CacheRestated: _RESTATED,
}
