"""Parses large requests in pieces, so that parsing does not block the event loop.

protobuf parses a message in one call that holds the GIL: 16 MB of empty items take over a second, 16 MB of
tokens 0.1 s. So a large message is cut at field boundaries and merged piece by piece, which has the same
result in the wire format. Other tasks run between the pieces. Requests over a limit are refused before they
are parsed.

This module uses the wire format and the names of the limited fields: calls, items, tokens, ids.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from quire.v1 import types_pb2

from service.api.masks import check_num_ids
from service.api.server_state import ServerState
from service.api.time_slice import TimeSlice
from service.api.validation import check_sample_seeds
from service.auth.authenticator import current_tenant
from service.errors import QuireError, SequenceTooLong, malformed_request, too_many

# A message of at most this size is parsed in one call, which takes 6 ms at worst, for empty items.
_SMALL_BYTES = 1 << 16
# The size of a piece of a larger message: 6 ms at worst, too, most of it to find the field boundaries.
_PIECE_BYTES = 1 << 14
# The most fields of a large message. Tokens are packed: a prompt is one field.
_MAX_FIELDS = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_COUNTED_BYTES = 1 << 19
# All bytes of a varint except the last one.
_CONTINUED = bytes(range(0x80, 0x100))


class LargeRequest:
    """A large message that is not parsed yet."""

    def __init__(self, message: Message, data: bytes, state: ServerState) -> None:
        self._message = message
        self._data = data
        self._state = state

    async def parse(self) -> Message | QuireError:
        """Parses the message, when it is the tenant's turn. Must be called only once: it drops the bytes.

        Returns an error instead of raising it: the caller first reads the request id for its log line.
        """
        async with self._state.parsing.turn(current_tenant()):
            time_slice = TimeSlice()
            data, self._data = self._data, b""
            try:
                for _ in _Parser(self._state).merge(self._message, data, is_whole=True):
                    if time_slice.due:
                        await time_slice.yield_to_others()
            except DecodeError:
                return malformed_request()
            except QuireError as error:
                return error.without_traceback()
            return self._message


async def parsed(received: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yields the parsed messages of a stream of requests. Raises QuireError for one that is refused."""
    async for one in received:
        message = await one.parse() if isinstance(one, LargeRequest) else one
        if isinstance(message, QuireError):
            raise message
        yield message


def deferring_deserializer(parse: Callable[[bytes], Any], state: ServerState) -> Callable[[bytes], Any]:
    """A deserializer that returns a message, a LargeRequest, or an error. `parse`: a FromString.

    It returns errors because grpc would answer INTERNAL for an exception.
    """
    message_type = parse.__self__  # type: ignore[attr-defined]

    def deserialize(data: bytes) -> Any:
        if len(data) > _SMALL_BYTES:
            return LargeRequest(message_type(), data, state)
        try:
            return parse(data)
        except DecodeError:
            return malformed_request()

    return deserialize


@dataclass(slots=True)
class _Field:
    """The position of a field in a message: its key begins at `start`, its contents at `body`."""

    number: int
    wire_type: int
    start: int
    body: int
    end: int


class _Parser:
    """Parses one message. Small messages are checked against the same limits after parsing."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._most_parts = {
            "calls": state.config.max_calls_per_message,
            "items": state.config.max_items_per_call,
            "forks": state.config.max_items_per_call,
        }
        self._fields = 0
        # The name of the mask's list that is being parsed.
        self._mask_kind = ""

    def merge(self, message: Message, data: bytes, *, is_whole: bool = False) -> Iterator[None]:
        """Merges `data` into `message`, and yields between pieces. Raises DecodeError and QuireError.

        `is_whole`: the message is the request itself. The limits of a part, such as an item of a batch, are
        checked later, because they fail only that part.
        """
        by_number = message.DESCRIPTOR.fields_by_number
        parts = 0
        start = 0
        for place in self._places(data):
            field: Any = by_number.get(place.number)
            if is_whole and field is not None:
                parts += field.is_repeated and field.message_type is not None
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
                # Groups, which no message of ours has.
                raise DecodeError
            if end > len(data):
                raise DecodeError
            yield _Field(key >> 3, wire_type, start, body, end)

    def _check(self, field: FieldDescriptor, parts: int, data: bytes, place: _Field) -> Iterator[None]:
        """Raises QuireError for a request whose fields are over a limit, without parsing them."""
        if parts > self._most_parts.get(field.name, parts):
            raise too_many(field.name, self._most_parts[field.name])
        limit = self._state.max_seq_tokens
        if field.name == "token_ids" and limit is not None and place.end - place.body > limit:
            tokens = yield from _count(data, place)
            if tokens > limit:
                raise SequenceTooLong(tokens, limit)

    def _check_mask(self, data: bytes, place: _Field) -> Iterator[None]:
        """Raises for a mask with more ids than the vocabulary: parsed, it would be many times as large."""
        limits = self._state.current_limits
        if limits is not None and place.end - place.body > limits.vocab_size:
            check_num_ids((yield from _count(data, place)), self._mask_kind, limits.vocab_size)

    def _merge_large(
        self, message: Message, field: FieldDescriptor | None, data: bytes, place: _Field
    ) -> Iterator[None]:
        """Merges one field that is larger than a piece."""
        if field is None:
            # An unknown field is kept, so that calls that refuse unknown fields find it.
            message.MergeFromString(data[place.start : place.end])
            yield
        elif field.message_type is not None and place.wire_type == _BYTES:
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
                # Checked first: parsed, they would be eight times as large.
                check_sample_seeds((yield from _count(data, place)))
            for numbers in _cut(data[place.body : place.end]):
                key = data[place.start : _varint(data, place.start)[1]]
                message.MergeFromString(key + to_varint(len(numbers)) + numbers)
                yield
        else:
            message.MergeFromString(data[place.start : place.end])
            yield


def _count(data: bytes, place: _Field) -> Generator[None, None, int]:
    """Counts packed numbers, and yields between slices: a megabyte takes 2 ms."""
    numbers = 0
    for start in range(place.body, place.end, _COUNTED_BYTES):
        part = data[start : min(start + _COUNTED_BYTES, place.end)]
        numbers += len(part.translate(None, _CONTINUED))
        yield
    return numbers


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decodes a varint. Returns it and the position after it. Raises DecodeError."""
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


def to_varint(number: int) -> bytes:
    """Encodes a number as a varint."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _cut(packed: bytes) -> Iterator[bytes]:
    """Cuts packed numbers into pieces of whole numbers. Raises DecodeError."""
    start = 0
    while start < len(packed):
        end = min(start + _PIECE_BYTES, len(packed))
        # Go back to the end of a number.
        while packed[end - 1] >= 0x80:
            end -= 1
            if end <= start:
                raise DecodeError
        yield packed[start:end]
        start = end
