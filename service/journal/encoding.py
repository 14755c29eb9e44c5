"""Encodes records as frames, and decodes frames.

A frame holds the records of one or more commits. A journal is a sequence of frames, in segment files or as
rows of PostgreSQL:

    frame   length of the payload u32, number u64, wall_ns i64, checksum of 8 bytes, payload
    payload items: kind u8, length of the body u32, body

All values are little-endian, as the machines are. The checksum is BLAKE2b of a seed and of the frame without
the checksum. Each segment, or each shard of a database, has its own seed, so that frames of another one are
not accepted.

An item is one record, or packed decodes: a run of appends of one token each, to any caches, with 20 bytes per
append. The body of a record has the fields of its class in order: integers as u64, floats as f64; texts,
bytes and tokens after their length as u32. A field that can be None begins with a u8: whether it is present.

**The format changes only so that this code could read it too**: a new record gets a new kind; a new field
goes to the end of its class and has a default, which is used where a body ends before the field. A program
that finds an unknown kind or a longer body refuses the journal. It never takes a frame with a correct
checksum for a damaged one, since damaged frames at the end are dropped.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from types import UnionType
from typing import Any, BinaryIO, Final, NamedTuple

from service.caches import records as cache_records
from service.caches.records import Record, TokensAppended

_HEAD: Final = struct.Struct("<IQq")
_CHECKSUM_BYTES: Final = 8
# The size of a frame without its payload.
FRAME_BYTES: Final = _HEAD.size + _CHECKSUM_BYTES
_ITEM: Final = struct.Struct("<BI")
_U8, _U32, _U64, _F64 = map(struct.Struct, ("<B", "<I", "<Q", "<d"))
# Number, position, prompt_len, ownership and token, each a u32.
PACKED_DECODE_BYTES: Final = 20
_PACKED_DECODE_VALUES: Final = PACKED_DECODE_BYTES // 4


_PACKED_DECODES: Final = 0
_KINDS: Final[dict[int, type]] = {
    1: cache_records.CacheCreated,
    2: TokensAppended,
    3: cache_records.CacheTruncated,
    4: cache_records.CacheForked,
    5: cache_records.LeaseRenewed,
    6: cache_records.CacheReleased,
    7: cache_records.CacheRestated,
    8: cache_records.ValueStored,
}
_KIND_OF: Final = {cls: kind for kind, cls in _KINDS.items()}


class DamagedFrame(Exception):
    """Bytes are not a valid frame. The message says where, and what is wrong."""


class UnknownRecord(Exception):
    """A frame with a correct checksum has an unknown payload: a newer version wrote it."""


class Frame(NamedTuple):
    """A frame that was read, and where it ends."""

    number: int
    wall_ns: int
    payload: bytes
    end: int


def seed_of(identity: bytes) -> blake2b:
    """The checksum seed of the frames of one segment or shard."""
    return blake2b(identity, digest_size=_CHECKSUM_BYTES)


def checksum(data: bytes) -> bytes:
    """The checksum of data other than a frame."""
    return blake2b(data, digest_size=_CHECKSUM_BYTES).digest()


def seal(payloads: Sequence[bytes], number: int, wall_ns: int, seed: blake2b) -> bytes:
    """Makes one frame of several results of `encode`."""
    payload = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    head = _HEAD.pack(len(payload), number, wall_ns)
    hashed = seed.copy()
    hashed.update(head)
    hashed.update(payload)
    return b"".join((head, hashed.digest(), payload))


def read_frames(file: BinaryIO, end: int, seed: blake2b) -> Iterator[Frame]:
    """Yields the frames from a file's position up to `end`. Raises DamagedFrame, OSError."""
    at = file.tell()
    while at < end:
        start = file.read(FRAME_BYTES)
        if len(start) < FRAME_BYTES:
            raise DamagedFrame(f"byte {at}: a frame is cut off")
        length, number, wall_ns = _HEAD.unpack_from(start)
        if length > end - at - FRAME_BYTES:
            raise DamagedFrame(f"byte {at}: a frame is cut off, or its length is wrong")
        payload = file.read(length)
        hashed = seed.copy()
        hashed.update(start[: _HEAD.size])
        hashed.update(payload)
        if hashed.digest() != start[_HEAD.size :]:
            raise DamagedFrame(f"byte {at}: the checksum of a frame differs")
        at += FRAME_BYTES + length
        yield Frame(number, wall_ns, payload, at)


def encode(records: Sequence[Record]) -> bytes:
    """Encodes records as a payload. Raises ValueError if a value is out of its range."""
    items: list[bytes] = []
    packed_values: list[int] = []
    packed_records: list[TokensAppended] = []
    for record in records:
        if (
            type(record) is TokensAppended
            and len(record.token_ids) == 1
            and not record.accept
            and not record.fingerprint
        ):
            packed_values += (record.number, record.position, record.prompt_len, record.ownership)
            packed_values += record.token_ids
            packed_records.append(record)
            continue
        if packed_values:
            items += _encode_decodes(packed_values, packed_records)
            packed_values, packed_records = [], []
        items.append(_encode_one(record))
    if packed_values:
        items += _encode_decodes(packed_values, packed_records)
    return items[0] if len(items) == 1 else b"".join(items)


def decode(payload: bytes) -> Iterator[Record]:
    """Yields the records of a payload. Raises UnknownRecord, maybe after some records."""
    for item in decode_packed(payload):
        if not isinstance(item, bytes):
            yield item
            continue
        values = array("I", item)
        for at in range(0, len(values), _PACKED_DECODE_VALUES):
            number, position, prompt_len, ownership, _ = values[at : at + _PACKED_DECODE_VALUES]
            yield TokensAppended(number, position, values[at + 4 : at + 5], prompt_len, ownership)


def decode_packed(payload: bytes) -> Iterator[Record | bytes]:
    """As `decode`, but yields packed decodes as bytes: `PACKED_DECODE_BYTES` for each append of one token."""
    body = _Body(payload)
    while body.at < body.end:
        kind, length = _ITEM.unpack(body.take(_ITEM.size))
        item = body.take(length)
        if kind == _PACKED_DECODES:
            if length % PACKED_DECODE_BYTES:
                raise UnknownRecord("packed decodes of another length")
            yield item
        else:
            yield _decode_one(kind, item)


def _encode_decodes(values: list[int], records: list[TokensAppended]) -> list[bytes]:
    try:
        packed = array("I", values)
    except OverflowError:
        # A value needs more than 32 bits: encode each append as a record instead.
        return [_encode_one(record) for record in records]
    body = packed.tobytes()
    return [_ITEM.pack(_PACKED_DECODES, len(body)) + body]


def _encode_one(record: Record) -> bytes:
    cls = type(record)
    try:
        body = _codec_of(cls).write(record)
        return _ITEM.pack(_KIND_OF[cls], len(body)) + body
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{cls.__name__} of a cache does not fit its encoding: {error}") from None


def _decode_one(kind: int, item: bytes) -> Record:
    cls = _KINDS.get(kind)
    if cls is None:
        raise UnknownRecord(f"records of kind {kind} are unknown")
    body = _Body(item)
    record: Record = _codec_of(cls).read(body)
    if body.at < body.end:
        raise UnknownRecord(f"{cls.__name__} has {body.end - body.at} bytes more than are known")
    return record


# Codecs of values, by the types of fields.


class _Body:
    """A bounds-checked reader of bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at, self.end = 0, len(data)

    def take(self, size: int) -> bytes:
        start = self.at
        if size > self.end - start:
            raise UnknownRecord("a record is cut off")
        self.at = start + size
        return self._data[start : self.at]

    def blob(self) -> bytes:
        return self.take(*_U32.unpack(self.take(_U32.size)))

    def text(self) -> str:
        try:
            return self.blob().decode()
        except UnicodeDecodeError:
            raise UnknownRecord("a text is not UTF-8") from None

    def tokens(self) -> array[int]:
        packed = self.blob()
        if len(packed) % 4:
            raise UnknownRecord("tokens are cut off")
        return array("I", packed)


class _Codec(NamedTuple):
    write: Callable[[Any], bytes]
    read: Callable[[_Body], Any]


def _value(layout: struct.Struct) -> _Codec:
    return _Codec(layout.pack, lambda body: layout.unpack(body.take(layout.size))[0])


def _write_blob(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


_CODECS: Final[dict[Any, _Codec]] = {
    int: _value(_U64),
    float: _value(_F64),
    str: _Codec(lambda text: _write_blob(text.encode()), _Body.text),
    bytes: _Codec(_write_blob, _Body.blob),
    Sequence[int]: _Codec(lambda tokens: _write_blob(array("I", tokens).tobytes()), _Body.tokens),
}


def _codec_of(kind: Any) -> _Codec:
    """The codec for a class of records or the type of a field."""
    if kind not in _CODECS:
        if isinstance(kind, UnionType):
            codec = _optional(_codec_of(typing.get_args(kind)[0]))
        elif typing.get_origin(kind) is Sequence:
            codec = _list_of(_codec_of(typing.get_args(kind)[0]))
        else:
            codec = _fields_of(kind)
        _CODECS[kind] = codec
    return _CODECS[kind]


def _optional(codec: _Codec) -> _Codec:
    return _Codec(
        lambda value: _U8.pack(0) if value is None else _U8.pack(1) + codec.write(value),
        lambda body: codec.read(body) if _U8.unpack(body.take(1))[0] else None,
    )


def _list_of(codec: _Codec) -> _Codec:
    def write(values: Sequence[object]) -> bytes:
        return _U32.pack(len(values)) + b"".join(map(codec.write, values))

    def read(body: _Body) -> list[Any]:
        # A count that is too large fails at the end of the body.
        return [codec.read(body) for _ in range(*_U32.unpack(body.take(_U32.size)))]

    return _Codec(write, read)


def _fields_of(cls: Any) -> _Codec:
    types = typing.get_type_hints(cls)
    codecs = [(field, _codec_of(types[field.name])) for field in dataclasses.fields(cls)]

    def write(value: object) -> bytes:
        return b"".join([codec.write(getattr(value, field.name)) for field, codec in codecs])

    def read(body: _Body) -> Any:
        values: list[Any] = []
        for field, codec in codecs:
            if body.at == body.end and field.default is not dataclasses.MISSING:
                break
            values.append(codec.read(body))
        return cls(*values)

    return _Codec(write, read)
