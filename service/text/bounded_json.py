"""Limits JSON by the number of its values, which is counted before it is parsed.

Python's parser blocks all other threads, and makes objects of sixty bytes from two bytes of JSON. Its time
depends on the number of values more than on bytes: a string, list or object costs as much as eight numbers,
so it counts as 8. Counting creates no objects and stops at a limit.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from quire.v1 import runner_pb2

from service.errors import InvalidArgument

# Limits of a schema, or of all JSON in a chat together: so much is parsed in some ten milliseconds.
MAX_BYTES = 2 << 20
MAX_VALUES = 1 << 18
MAX_MESSAGES = 4096
# What a string, list or object counts as.
_COMPOUND_VALUES = 8
# What a slice of the count reads, in a millisecond or two: strings, or a part of one.
_SLICE_STRINGS = 1024
_STRING_PART = re.compile(rb'(?:[^"\\]{1,64}+|\\.){0,4096}+', re.DOTALL)


def upper_bound(body: bytes) -> int:
    """At least as many values as some JSON has. Costs almost nothing, but also counts marks in strings."""
    return _values_between(body, 0, len(body)) + (body.count(b'"') + 1) // 2 * _COMPOUND_VALUES


def count_in_slices(body: bytes, limit: int) -> Iterator[int]:
    """Counts the values of some JSON up to a limit.

    Yields the count so far after each slice of work. The last count is the result: exact, or above `limit`.
    Of invalid JSON it counts at least the values before the error.
    """
    count = strings = position = 0
    while count <= limit:
        begin = body.find(b'"', position)
        count += _values_between(body, position, len(body) if begin < 0 else begin)
        if begin < 0:
            break
        count += _COMPOUND_VALUES
        strings += 1
        if not strings % _SLICE_STRINGS:
            yield count
        position = begin + 1
        while (part := _STRING_PART.match(body, position)) is not None and part.end() > position:
            position = part.end()
            if body[position : position + 1] != b'"':
                yield count
        position += 1
    yield count


async def count_values(body: bytes, limit: int) -> int:
    """The result of `count_in_slices`. Lets other tasks run between slices."""
    counts = count_in_slices(body, limit)
    count = next(counts)
    for next_count in counts:
        await asyncio.sleep(0)
        count = next_count
    return count


def parse(text: str, reason: str, field: str) -> Any:
    """Parses JSON that a caller sent in a field. Raises InvalidArgument."""
    body = text.encode()
    if len(body) > MAX_BYTES or (
        upper_bound(body) > MAX_VALUES and max(count_in_slices(body, MAX_VALUES)) > MAX_VALUES
    ):
        raise _too_large(reason, field)
    try:
        return loads(text)
    except ValueError:
        raise InvalidArgument(reason, field, f"{_name(field)} is not JSON") from None


def loads(text: str) -> Any:
    """As `json.loads`, but refuses NaN and the infinities. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError from None


async def check_chat(chat: runner_pb2.Chat) -> None:
    """Checks that parsing all JSON of a chat does not block others for long. Raises InvalidArgument."""
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidArgument("BAD_CHAT", "chat.messages", f"has more than {MAX_MESSAGES} messages")
    limit = MAX_VALUES - _COMPOUND_VALUES * sum(len(message.tool_calls) for message in chat.messages)
    if limit < 0:
        raise _too_large("BAD_CHAT", "chat.messages")
    size_bytes = values = 0
    for field, text in _json_of(chat):
        size_bytes += len(text)
        values += upper_bound(text)
        if size_bytes > MAX_BYTES:
            raise _too_large("BAD_CHAT", field)
    if values <= limit:
        return
    # Exactly: the upper bound also counts commas and brackets in strings.
    values = 0
    for field, text in _json_of(chat):
        values += await count_values(text, limit - values)
        if values > limit:
            raise _too_large("BAD_CHAT", field)


def arguments_field(message: int, call: int) -> str:
    """The path of a tool call's arguments in an item."""
    return f"chat.messages[{message}].tool_calls[{call}].arguments_json"


def _json_of(chat: runner_pb2.Chat) -> Iterator[tuple[str, bytes]]:
    """Each field of a chat that is JSON."""
    yield "chat.tools_json", chat.tools_json.encode()
    for index, message in enumerate(chat.messages):
        for number, call in enumerate(message.tool_calls):
            yield arguments_field(index, number), call.arguments_json.encode()


def _values_between(body: bytes, begin: int, end: int) -> int:
    """Values in a part without strings: a comma stands for the value before it."""
    compounds = body.count(b"[", begin, end) + body.count(b"{", begin, end)
    return body.count(b",", begin, end) + compounds * _COMPOUND_VALUES


def _refuse(_constant: str) -> NoReturn:
    raise ValueError


def _too_large(reason: str, field: str) -> InvalidArgument:
    limits = f"at most {MAX_BYTES} bytes and {MAX_VALUES} values (a string, list or object counts as 8)"
    return InvalidArgument(reason, field, f"{_name(field)}, or all JSON of the chat, is too large: {limits}")


def _name(field: str) -> str:
    return field.rpartition(".")[2]
