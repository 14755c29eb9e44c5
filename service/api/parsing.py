"""Requests from bytes, in slices.

protobuf parses a message in one go, and no other thread runs meanwhile: 16 MB of empty items take it over
a second, 16 MB of tokens a tenth of one. So a large message is cut where fields begin and merged piece by
piece, which to the wire format is the same; others are served between the pieces. What nobody would send is
refused on the way, before it is parsed.

Knows the wire format, and the names of what is bounded: calls, items, tokens, ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from quire.v1 import types_pb2

from service.api.breath import Breather
from service.api.validation import check_sample_seeds
from service.errors import InvalidArgument, QuireError, SequenceTooLong, too_many, too_many_forks

# A message of at most this size is parsed at once: 6 ms at worst, if it is nothing but empty items.
_SMALL_BYTES = 1 << 16
# A piece of a larger one: also 6 ms at worst, most of which goes into finding where its fields begin.
_PIECE_BYTES = 1 << 14
# Fields of one large message that are looked at. Tokens are packed: a prompt is one field.
_MAX_FIELDS = 1 << 16
# Large messages that are parsed at once. A number of one byte becomes eight: what is refused once it is whole
# may be hundreds of megabytes until then. More of them at once would not be done any sooner.
_AT_ONCE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_COUNTED_BYTES = 1 << 19
# Bytes of a varint but its last.
_CONTINUED = bytes(range(0x80, 0x100))


@dataclass(frozen=True, slots=True)
class MessageLimits:
    """What large messages are held against while they are parsed; small ones later, like everything else."""

    max_calls: int = 4096
    max_items: int = 1024
    # What a sequence may have at most. None: not known yet.
    max_seq_tokens: Callable[[], int | None] = lambda: None
    # How many ids a mask can name. None: not known yet.
    vocab_size: Callable[[], int | None] = lambda: None
    # Of one server: held while a large one is parsed.
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE), compare=False)


class Malformed:
    """Stands for a message that is refused unread. grpc itself would answer INTERNAL."""

    def __init__(self, error: QuireError | None = None) -> None:
        self.error = error or InvalidArgument("MALFORMED_REQUEST", "", "the request is not a valid message")


class Large:
    """A message that is not parsed yet."""

    def __init__(self, message: Message, data: bytes, limits: MessageLimits) -> None:
        self._message = message
        self._data = data
        self._limits = limits

    async def parsed(self) -> Message | Malformed:
        """The message. Once: the bytes are gone afterwards. Others may have to be parsed first."""
        async with self._limits.turns:
            return await self._parsed_in_slices()

    async def _parsed_in_slices(self) -> Message | Malformed:
        breather = Breather()
        data, self._data = self._data, b""
        parser = _Parser(self._limits)
        try:
            for _ in parser.merge(self._message, data, is_whole=True):
                if breather.due:
                    await breather.breathe()
        except DecodeError:
            return Malformed()
        except QuireError as error:
            return Malformed(error.untraced())
        return self._message


def tolerant(parse: Callable[[bytes], Any], limits: MessageLimits) -> Callable[[bytes], Any]:
    """A deserializer whose handler is given a Malformed or a Large too. `parse`: a type's FromString."""
    message_type = parse.__self__  # type: ignore[attr-defined]

    def deserialize(data: bytes) -> Any:
        if len(data) > _SMALL_BYTES:
            return Large(message_type(), data, limits)
        try:
            return parse(data)
        except DecodeError:
            return Malformed()

    return deserialize


@dataclass(slots=True)
class _Field:
    """A field's place in the bytes: its key starts at `start`, its contents at `body`."""

    number: int
    wire_type: int
    start: int
    body: int
    end: int


class _Parser:
    """Parses one message."""

    def __init__(self, limits: MessageLimits) -> None:
        self._limits = limits
        self._fields = 0
        # Which of the lists of a mask is read.
        self._mask_kind = ""

    def merge(self, message: Message, data: bytes, *, is_whole: bool = False) -> Iterator[None]:
        """Merges `data` into `message`, and yields where others may run. Raises DecodeError and QuireError.

        `is_whole`: the message is the request itself, not a part whose refusal would be its own.
        """
        by_number = message.DESCRIPTOR.fields_by_number
        parts = 0
        start = 0
        for place in self._places(data):
            field: Any = by_number.get(place.number)
            if is_whole and field is not None:
                parts += _is_part(field)
                yield from self._check(field, parts, data, place)
            if place.end - start <= _PIECE_BYTES:
                continue
            message.MergeFromString(data[start : place.start])
            yield
            start = place.start
            if place.end - start > _PIECE_BYTES:
                yield from self._merge_large(message, field, data, place)
                start = place.end
        message.MergeFromString(data[start:])

    def _places(self, data: bytes) -> Iterator[_Field]:
        end = 0
        while end < len(data):
            self._fields += 1
            if self._fields > _MAX_FIELDS:
                raise too_many("fields", _MAX_FIELDS)
            start = end
            key, body = _varint(data, start)
            wire_type = key & 7
            if wire_type == _BYTES:
                size, body = _varint(data, body)
                end = body + size
            elif wire_type == _VARINT:
                _, end = _varint(data, body)
            elif wire_type in (_FIXED64, _FIXED32):
                end = body + (8 if wire_type == _FIXED64 else 4)
            else:
                # Groups: no message of ours has any.
                raise DecodeError
            if end > len(data):
                raise DecodeError
            yield _Field(key >> 3, wire_type, start, body, end)

    def _check(self, field: FieldDescriptor, parts: int, data: bytes, place: _Field) -> Iterator[None]:
        """Refuses a request for what is seen from outside."""
        if field.name == "calls" and parts > self._limits.max_calls:
            raise too_many("calls", self._limits.max_calls)
        if field.name == "items" and parts > self._limits.max_items:
            raise too_many("items", self._limits.max_items)
        if field.name == "forks" and parts > self._limits.max_items:
            raise too_many_forks(self._limits.max_items)
        limit = self._limits.max_seq_tokens()
        if field.name == "token_ids" and limit is not None and place.end - place.body > limit:
            tokens = yield from _count(data, place)
            if tokens > limit:
                raise SequenceTooLong(tokens, limit)

    def _check_mask(self, data: bytes, place: _Field) -> Iterator[None]:
        """Refuses a mask that names more ids than there are: parsed it would be many times as large."""
        limit = self._limits.vocab_size()
        if limit is None or place.end - place.body <= limit:
            return
        ids = yield from _count(data, place)
        if ids > limit:
            text = f"{ids} ids were sent, there are {limit} tokens"
            raise InvalidArgument("BAD_MASK", f"output.mask.{self._mask_kind}", text)

    def _merge_large(
        self, message: Message, field: FieldDescriptor | None, data: bytes, place: _Field
    ) -> Iterator[None]:
        """Merges one field that is larger than a piece."""
        if field is None:
            # Nobody would read it.
            return
        if field.message_type is not None and place.wire_type == _BYTES:
            if field.message_type.GetOptions().map_entry:
                raise DecodeError
            if field.message_type.name == types_pb2.TokenIds.DESCRIPTOR.name:
                self._mask_kind = field.name
            part = getattr(message, field.name)
            part = part.add() if field.is_repeated else part
            yield from self.merge(part, data[place.body : place.end])
        elif field.is_repeated and field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64):
            if field.name == "ids":
                yield from self._check_mask(data, place)
            if field.name == "sample_seeds":
                # Parsed they would be eight times as large.
                check_sample_seeds((yield from _count(data, place)))
            for numbers in _cut(data[place.body : place.end]):
                key = data[place.start : _varint(data, place.start)[1]]
                message.MergeFromString(key + _to_varint(len(numbers)) + numbers)
                yield
        else:
            message.MergeFromString(data[place.start : place.end])
            yield


def _is_part(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated) and field.message_type is not None


def _count(data: bytes, place: _Field) -> Generator[None, None, int]:
    """How many packed numbers there are, in slices: it takes 2 ms for each megabyte."""
    numbers = 0
    for start in range(place.body, place.end, _COUNTED_BYTES):
        part = data[start : min(start + _COUNTED_BYTES, place.end)]
        numbers += len(part.translate(None, _CONTINUED))
        yield
    return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends. Raises DecodeError."""
    number = shift = 0
    try:
        while True:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at
            shift += 7
            if shift > 63:
                raise DecodeError
    except IndexError:
        raise DecodeError from None


def _to_varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _cut(packed: bytes) -> Iterator[bytes]:
    """Packed numbers in pieces that end where a number does. Raises DecodeError."""
    start = 0
    while start < len(packed):
        end = min(start + _PIECE_BYTES, len(packed))
        # A number has few bytes.
        while packed[end - 1] >= 0x80:
            end -= 1
            if end <= start:
                raise DecodeError
        yield packed[start:end]
        start = end
