"""How many values some JSON has, found out before it is parsed.

Python's parser lets nothing else run while it works, and makes objects of sixty bytes out of two. What takes
it long is not the bytes but the values: a string, a list or an object counts as eight numbers. This counts
them without making any, and no further than to a bound.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

from quire.v1 import runner_pb2

from service.errors import InvalidArgument

# Of all JSON in a chat together, or of a schema: it is parsed in some ten milliseconds.
MAX_BYTES = 2 << 20
MAX_VALUES = 1 << 18
MAX_MESSAGES = 4096
# What a string, a list or an object counts.
_WEIGHT = 8
# What is looked at in one go, a millisecond or two: strings, and parts of one.
_STRINGS = 1024
_PART = re.compile(rb'(?:[^"\\]{1,64}+|\\.){0,4096}+', re.DOTALL)


def estimated(body: bytes) -> int:
    """About how many values some JSON has: at least as many as it has. Takes next to nothing."""
    return _weighed(body, 0, len(body)) + (body.count(b'"') + 1) // 2 * _WEIGHT


def counting(body: bytes, most: int) -> Generator[None, None, int]:
    """Returns how many values some JSON has, or more than `most` once that is clear.

    Yields where others can run. What is no JSON has at least as many as its beginning that is.
    """
    count = strings = position = 0
    while count <= most:
        begin = body.find(b'"', position)
        count += _weighed(body, position, len(body) if begin < 0 else begin)
        if begin < 0:
            break
        count += _WEIGHT
        strings += 1
        if not strings % _STRINGS:
            yield
        position = begin + 1
        while (part := _PART.match(body, position)) is not None and part.end() > position:
            position = part.end()
            if body[position : position + 1] != b'"':
                yield
        position += 1
    return count


def parsed(text: str, reason: str, field: str) -> Any:
    """JSON that a caller sent in a field. Raises InvalidArgument."""
    body = text.encode()
    if len(body) > MAX_BYTES or (estimated(body) > MAX_VALUES and _counted(body) > MAX_VALUES):
        raise _too_large(reason, field)
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        raise InvalidArgument(reason, field, f"{_name(field)} is not JSON") from None


async def check_chat(chat: runner_pb2.Chat) -> None:
    """All JSON of a chat together can be parsed without holding up others. Raises InvalidArgument."""
    if len(chat.messages) > MAX_MESSAGES:
        raise InvalidArgument("BAD_CHAT", "chat.messages", f"has more than {MAX_MESSAGES} messages")
    most = MAX_VALUES - _WEIGHT * sum(len(message.tool_calls) for message in chat.messages)
    if most < 0:
        raise _too_large("BAD_CHAT", "chat.messages")
    size_bytes = values = 0
    for field, text in _json_of(chat):
        size_bytes += len(text)
        values += estimated(text)
        if size_bytes > MAX_BYTES:
            raise _too_large("BAD_CHAT", field)
    if values <= most:
        return
    # Marks in strings are no values.
    values = 0
    for field, text in _json_of(chat):
        slices = counting(text, most - values)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                values += end.value
                break
            await asyncio.sleep(0)
        if values > most:
            raise _too_large("BAD_CHAT", field)


def arguments_field(message: int, call: int) -> str:
    """Where the arguments of a call stand in an item."""
    return f"chat.messages[{message}].tool_calls[{call}].arguments_json"


def _json_of(chat: runner_pb2.Chat) -> Iterator[tuple[str, bytes]]:
    """Each field of a chat that is JSON."""
    yield "chat.tools_json", chat.tools_json.encode()
    for index, message in enumerate(chat.messages):
        for number, call in enumerate(message.tool_calls):
            yield arguments_field(index, number), call.arguments_json.encode()


def _counted(body: bytes) -> int:
    slices = counting(body, MAX_VALUES)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return int(end.value)


def _weighed(body: bytes, begin: int, end: int) -> int:
    """What a part outside of strings counts."""
    lists = body.count(b"[", begin, end) + body.count(b"{", begin, end)
    return body.count(b",", begin, end) + lists * _WEIGHT


def _refuse(_constant: str) -> NoReturn:
    """Refuses NaN and the infinities, which JSON does not have."""
    raise ValueError


def _too_large(reason: str, field: str) -> InvalidArgument:
    most = f"at most {MAX_BYTES} bytes and {MAX_VALUES} values, of which a text, list or object counts as 8"
    return InvalidArgument(reason, field, f"{_name(field)} is too large, or all JSON of the chat: {most}")


def _name(field: str) -> str:
    return field.rpartition(".")[2]
