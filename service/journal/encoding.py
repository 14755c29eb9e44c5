"""Encodes records as bytes, and decodes them.

A row holds the records of one or more commits:

    row     version u8, 0 u8, 0 u16, length of the frames u32, crc32 u32, frames
    frame   length of the body u32, kind u8, body, crc32 u32

All values are little-endian. The crc of a row covers the bytes before it and the row's number and time, which
are stored beside the row. The crc of a frame covers the bytes before it in the frame. A frame holds one
record, or packed decodes: a run of appends of one token each, of any caches, with 20 bytes an append.

A record that creates a cache ends with the number of its weights, unless that is 0. Such a record has a kind
of its own. Earlier versions used the same kind with and without weights, which can still be read.

A program that does not know the format of a row must refuse the journal. It must not treat the row as a
damaged one, since a damaged last row is dropped.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final
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
VERSION: Final = 3
_FIRST_VERSION: Final = 1
_TOKEN_BYTES: Final = 4
_ROW_HEAD = struct.Struct("<BBHI")
_ROW_KEY = struct.Struct("<Qq")
_FRAME_HEAD = struct.Struct("<IB")
_CRC = struct.Struct("<I")
_ROW_HEAD_BYTES: Final = _ROW_HEAD.size
_CRC_RESIDUE: Final = 0x2144DF1C
# Everything before the body of the first frame. The version and the zeros after it are one number.
_PACKED_ROW_HEAD = struct.Struct("<IIIIB")
_ROW_START: Final = _ROW_HEAD.size + _CRC.size
FRAME_BYTES: Final = _FRAME_HEAD.size + _CRC.size

_CREATED, _APPENDED, _TRUNCATED, _FORKED, _RENEWED, _RELEASED, _RESTATED, _PACKED_DECODES = range(1, 9)
# A fork of one of several parents in a request; caches with weights other than 0.
_FORKED_TOGETHER, _CREATED_WITH_WEIGHTS, _RESTATED_WITH_WEIGHTS = range(9, 12)
# The first format that has a kind, if that is not the first of all.
_FORMATS: Final = {_FORKED_TOGETHER: 2, _CREATED_WITH_WEIGHTS: 3, _RESTATED_WITH_WEIGHTS: 3}

_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_CREATED_HEAD = struct.Struct("<QQd")
_APPENDED_HEAD = struct.Struct("<QQQQQ")
_TRUNCATED_BODY = struct.Struct("<QQ")
_CHILD_HEAD = struct.Struct("<QQ")
_FORK_PLACE = struct.Struct("<QQ")
_RENEWED_BODY = struct.Struct("<Qd")
_RESTATED_HEAD = struct.Struct("<QQdQQQQBB")
_LAST_HEAD = struct.Struct("<QQQ")
_FORK_HEAD = struct.Struct("<QQQ")
# Number, position, prompt_len, ownership and token, each an u32.
PACKED_DECODE_BYTES: Final = 20
_PACKED_DECODE_VALUES: Final = PACKED_DECODE_BYTES // _TOKEN_BYTES


class CorruptRecord(Exception):
    """Damaged bytes. The message names the offset in the row and the damage."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(f"byte {at}: {what}")


class NewerFormat(CorruptRecord):
    """A row of a newer version of this program."""


class DecodeRecords:
    """Packed decodes as in a row: `PACKED_DECODE_BYTES` for each append of one token."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def records(self) -> Iterator[TokensAppended]:
        """One record for each append."""
        values = _array_of(self.packed)
        for at in range(0, len(values), _PACKED_DECODE_VALUES):
            number, position, prompt_len, ownership, _ = values[at : at + _PACKED_DECODE_VALUES]
            yield TokensAppended(number, position, values[at + 4 : at + 5], prompt_len, ownership)


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


def seal(frames: Sequence[bytes], seq: int, wall_ns: int) -> bytes:
    """Makes a row of results of `encode`. Its crc includes `seq` and `wall_ns`."""
    version = max(map(_format_of, frames), default=_FIRST_VERSION)
    head = _ROW_HEAD.pack(version, 0, 0, sum(map(len, frames)))
    return b"".join((head, _CRC.pack(crc32(head, crc32(_ROW_KEY.pack(seq, wall_ns)))), *frames))


def _format_of(frames: bytes) -> int:
    """The oldest format that has all kinds of these frames."""
    at, version = 0, _FIRST_VERSION
    while at < len(frames):
        length, kind = _FRAME_HEAD.unpack_from(frames, at)
        version = max(version, _FORMATS.get(kind, _FIRST_VERSION))
        at += FRAME_BYTES + length
    return version


def decode(row: bytes, seq: int, wall_ns: int) -> Iterator[Record]:
    """Yields the records of a row. Raises CorruptRecord, maybe after some records."""
    for item in decode_packed(row, seq, wall_ns):
        if isinstance(item, DecodeRecords):
            yield from item.records()
        else:
            yield item


def read_packed_row(row: bytes, seq: int, wall_ns: int) -> bytes | None:
    """The packed decodes of a row that holds nothing else. None for other rows and damaged ones.

    Most rows are like that, and this takes a third of the time of `decode_packed`.
    """
    if len(row) < _PACKED_ROW_HEAD.size + _CRC.size:
        return None
    start, length, head_crc, size, kind = _PACKED_ROW_HEAD.unpack_from(row)
    if (
        kind != _PACKED_DECODES
        or start != _FIRST_VERSION
        or length != len(row) - _ROW_START
        or size != len(row) - _PACKED_ROW_HEAD.size - _CRC.size
        or size % PACKED_DECODE_BYTES
        or crc32(row[:_ROW_HEAD_BYTES], crc32(_ROW_KEY.pack(seq, wall_ns))) != head_crc
        # The crc of data followed by its own crc is a constant.
        or crc32(row[_ROW_START:]) != _CRC_RESIDUE
    ):
        return None
    return row[_PACKED_ROW_HEAD.size : -_CRC.size]


def decode_packed(row: bytes, seq: int, wall_ns: int) -> Iterator[Record | DecodeRecords]:
    """As `decode`, but leaves packed decodes packed."""
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
            yield DecodeRecords(row[body:end])
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


def _frame(kind: int, *parts: bytes) -> bytes:
    body = b"".join((_FRAME_HEAD.pack(sum(map(len, parts)), kind), *parts))
    return body + _CRC.pack(crc32(body))


def _encode_decodes(values: list[int], records: list[TokensAppended]) -> list[bytes]:
    try:
        return [_frame(_PACKED_DECODES, _packed(array("I", values)))]
    except OverflowError:
        # A value needs more than 32 bits, for which other records have room.
        return [_encode_one(record) for record in records]


def _encode_one(record: Record) -> bytes:
    try:
        return _ENCODERS[type(record)](record)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{type(record).__name__} of a cache does not fit its encoding: {error}") from None


def _encode_created(record: CacheCreated) -> bytes:
    return _frame(
        _CREATED_WITH_WEIGHTS if record.weights else _CREATED,
        _CREATED_HEAD.pack(record.number, record.seed, record.lease_s),
        _blob(record.cache_id.encode()),
        _blob(record.tenant.encode()),
        _blob(record.request_id.encode()),
        _blob(record.salt),
        _weights(record.weights),
    )


def _encode_appended(record: TokensAppended) -> bytes:
    head = _APPENDED_HEAD.pack(
        record.number, record.position, record.prompt_len, record.ownership, record.accept
    )
    return _frame(_APPENDED, head, _blob(record.asked), _tokens(record.token_ids))


def _encode_truncated(record: CacheTruncated) -> bytes:
    return _frame(_TRUNCATED, _TRUNCATED_BODY.pack(record.number, record.new_len))


def _encode_forked(record: CacheForked) -> bytes:
    parts = [_NUMBER.pack(record.parent), _blob(record.request_id.encode())]
    parts.append(_LENGTH.pack(len(record.children)))
    for child in record.children:
        parts += (_CHILD_HEAD.pack(child.number, child.seed), _blob(child.cache_id.encode()))
    if not record.total:
        return _frame(_FORKED, *parts)
    return _frame(_FORKED_TOGETHER, *parts, _FORK_PLACE.pack(record.total, record.first))


def _encode_renewed(record: LeaseRenewed) -> bytes:
    return _frame(_RENEWED, _RENEWED_BODY.pack(record.number, record.lease_s))


def _encode_released(record: CacheReleased) -> bytes:
    return _frame(_RELEASED, _NUMBER.pack(record.number))


def _encode_restated(record: CacheRestated) -> bytes:
    last, fork = record.last, record.fork
    head = _RESTATED_HEAD.pack(
        record.number,
        record.seed,
        record.lease_s,
        record.prompt_len,
        record.ownership,
        record.shares_with,
        record.shared_len,
        last is not None,
        fork is not None,
    )
    parts = [head, *(_blob(text.encode()) for text in (record.cache_id, record.tenant, record.request_id))]
    parts.append(_blob(record.salt))
    if last is not None:
        parts += (_LAST_HEAD.pack(last.base, last.kept, last.accept), _blob(last.asked))
    if fork is not None:
        parts += (_FORK_HEAD.pack(fork.parent, fork.index, fork.count), _blob(fork.request_id.encode()))
    kind = _RESTATED_WITH_WEIGHTS if record.weights else _RESTATED
    return _frame(kind, *parts, _tokens(record.token_ids), _weights(record.weights))


_ENCODERS: Final[dict[type, Callable[..., bytes]]] = {
    CacheCreated: _encode_created,
    TokensAppended: _encode_appended,
    CacheTruncated: _encode_truncated,
    CacheForked: _encode_forked,
    LeaseRenewed: _encode_renewed,
    CacheReleased: _encode_released,
    CacheRestated: _encode_restated,
}


def _blob(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _weights(number: int) -> bytes:
    return _NUMBER.pack(number) if number else b""


def _tokens(token_ids: Sequence[int]) -> bytes:
    return _blob(_packed(array("I", token_ids)))


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


class _Body:
    """Reads the body of a frame, never beyond its end."""

    def __init__(self, row: bytes, at: int, end: int) -> None:
        self._row = row
        self._at = at
        self._end = end

    def values(self, layout: struct.Struct) -> tuple[int, ...]:
        # Some values are floats. The type checker does not understand layouts.
        return layout.unpack_from(self._row, self._advance(layout.size))

    def blob(self) -> bytes:
        (length,) = self.values(_LENGTH)
        start = self._advance(length)
        return self._row[start : start + length]

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

    def weights(self) -> int:
        """Reads the optional number of the weights at the end of a record."""
        return self.values(_NUMBER)[0] if self._at < self._end else 0

    def end(self) -> None:
        if self._at != self._end:
            raise CorruptRecord(self._at, "a record has extra bytes")

    def _advance(self, size: int) -> int:
        start = self._at
        if size > self._end - start:
            raise CorruptRecord(start, "a record is truncated")
        self._at += size
        return start


def _decode_one(row: bytes, kind: int, at: int, end: int) -> Record:
    if kind not in _DECODERS:
        raise CorruptRecord(at, f"records of kind {kind} are unknown")
    body = _Body(row, at, end)
    record = _DECODERS[kind](body)
    body.end()
    return record


def _decode_created(body: _Body) -> CacheCreated:
    number, seed, lease_s = body.values(_CREATED_HEAD)
    cache_id, tenant, request_id = body.text(), body.text(), body.text()
    return CacheCreated(number, cache_id, tenant, body.blob(), seed, lease_s, request_id, body.weights())


def _decode_appended(body: _Body) -> TokensAppended:
    number, position, prompt_len, ownership, accept = body.values(_APPENDED_HEAD)
    asked = body.blob()
    return TokensAppended(number, position, body.tokens(), prompt_len, ownership, accept, asked)


def _decode_forked(body: _Body) -> CacheForked:
    (parent,) = body.values(_NUMBER)
    request_id = body.text()
    (count,) = body.values(_LENGTH)
    children = []
    # A wrong count fails at the end of the body.
    for _ in range(count):
        number, seed = body.values(_CHILD_HEAD)
        children.append(Child(number, body.text(), seed))
    return CacheForked(parent, children, request_id)


def _decode_forked_together(body: _Body) -> CacheForked:
    fork = _decode_forked(body)
    total, first = body.values(_FORK_PLACE)
    return CacheForked(fork.parent, fork.children, fork.request_id, total, first)


def _decode_restated(body: _Body) -> CacheRestated:
    head = body.values(_RESTATED_HEAD)
    number, seed, lease_s, prompt_len, ownership, shares_with, shared_len, has_last, has_fork = head
    cache_id, tenant, request_id, salt = body.text(), body.text(), body.text(), body.blob()
    last, fork = None, None
    if has_last:
        base, kept, accept = body.values(_LAST_HEAD)
        last = LastAppend(base, kept, accept, body.blob())
    if has_fork:
        parent, index, count = body.values(_FORK_HEAD)
        fork = ForkKey(body.text(), parent, index, count)
    return CacheRestated(
        number,
        cache_id,
        tenant,
        salt,
        seed,
        lease_s,
        request_id,
        prompt_len,
        ownership,
        last,
        fork,
        shares_with,
        shared_len,
        body.tokens(),
        body.weights(),
    )


_DECODERS: Final[dict[int, Callable[[_Body], Record]]] = {
    _CREATED: _decode_created,
    _CREATED_WITH_WEIGHTS: _decode_created,
    _APPENDED: _decode_appended,
    _TRUNCATED: lambda body: CacheTruncated(*body.values(_TRUNCATED_BODY)),
    _FORKED: _decode_forked,
    _FORKED_TOGETHER: _decode_forked_together,
    _RENEWED: lambda body: LeaseRenewed(*body.values(_RENEWED_BODY)),
    _RELEASED: lambda body: CacheReleased(*body.values(_NUMBER)),
    _RESTATED: _decode_restated,
    _RESTATED_WITH_WEIGHTS: _decode_restated,
}
