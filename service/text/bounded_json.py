"""Limits JSON by the number of its values, which is counted before it is parsed.

Python's parser blocks all other threads, and makes objects of sixty bytes from two bytes of JSON. Its time
depends on the number of values more than on bytes: a string, list or object costs as much as eight numbers,
so it counts as 8. Counting creates no objects and stops at a limit. Also what templates and providers read of
a chat in the same way.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from quire.v1 import runner_pb2

from service.errors import InvalidArgument

# Limits of a schema, or of all JSON in a chat together: so much is parsed in some ten milliseconds.
MAX_BYTES = 2 << 20
MAX_VALUES = 1 << 18
# The limit for tools, which are parsed, changed and written several times.
MAX_TOOLS_BYTES = 1 << 18
MAX_TOOLS_VALUES = 1 << 17
MAX_MESSAGES = 4096
# What a string, list or object counts as.
_COMPOUND_VALUES = 8
_ROLES = {
    runner_pb2.CHAT_ROLE_SYSTEM: "system",
    runner_pb2.CHAT_ROLE_USER: "user",
    runner_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    runner_pb2.CHAT_ROLE_TOOL: "tool",
}
# Counted at once, in well below a millisecond.
_SLICE_BYTES = 1 << 16


def count_in_slices(body: bytes | bytearray, limit: int) -> Iterator[int]:
    """Counts the values of some JSON up to a limit.

    Yields the count so far after each slice of work. The last count is the result: exact, or above `limit`.
    Of invalid JSON it counts at least the values before the error.
    """
    count = quotes = 0
    escape = b""
    for begin in range(0, max(1, len(body)), _SLICE_BYTES):
        # Without escapes, each quote begins or ends a string.
        part = escape + body[begin : begin + _SLICE_BYTES]
        part = part.replace(rb"\\", b"").replace(rb"\"", b"")
        escape = part[-1:] if part.endswith(b"\\") else b""
        texts = part.split(b'"')
        outside = b"".join(texts[quotes % 2 :: 2])
        quotes += len(texts) - 1
        # A comma stands for the value before it.
        count += outside.count(b",") + _COMPOUND_VALUES * (outside.count(b"[") + outside.count(b"{"))
        counted = count + _COMPOUND_VALUES * ((quotes + 1) // 2)
        yield counted
        if counted > limit:
            return


async def count_values(body: bytes | bytearray, limit: int) -> int:
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
    if len(body) > MAX_BYTES or max(count_in_slices(body, MAX_VALUES)) > MAX_VALUES:
        raise _too_large(reason, field)
    try:
        return loads(text)
    except ValueError:
        raise InvalidArgument(reason, field, "is not JSON") from None


def loads(text: str) -> Any:
    """As `json.loads`, but refuses NaN and the infinities. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
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
        if size_bytes <= MAX_BYTES:
            values += await count_values(text, limit - values)
        if size_bytes > MAX_BYTES or values > limit:
            raise _too_large("BAD_CHAT", field)


def openai_messages(chat: runner_pb2.Chat, arguments: Callable[[str, str], object]) -> list[dict[str, Any]]:
    """The messages in OpenAI's format, which templates read too. Raises InvalidArgument.

    `arguments` makes a tool call's arguments from their JSON; it also gets the path of that field.
    An empty content is an empty text.
    """
    messages = []
    for index, message in enumerate(chat.messages):
        fields: dict[str, Any] = {"role": chat_role(message, index), "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": arguments(call_arguments(call), arguments_field(index, number)),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        if message.name:
            fields["name"] = message.name
        messages.append(fields)
    return messages


def chat_role(message: runner_pb2.ChatMessage, index: int) -> str:
    """A message's role as templates and providers spell it. Raises InvalidArgument."""
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidArgument("BAD_CHAT", f"chat.messages[{index}].role", "a role is needed")
    return role


def tools_of(
    given: runner_pb2.Chat | runner_pb2.AnswerParts,
    parse_json: Callable[[str, str, str], Any] = parse,
    field: str = "chat.tools_json",
) -> list[Any]:
    """The tools of a chat, or of what has this path. Raises InvalidArgument."""
    body = given.tools_json.encode()
    if len(body) > MAX_TOOLS_BYTES or max(count_in_slices(body, MAX_TOOLS_VALUES)) > MAX_TOOLS_VALUES:
        raise _too_large("BAD_CHAT", field, MAX_TOOLS_BYTES, MAX_TOOLS_VALUES)
    tools = parse_json(given.tools_json, "BAD_CHAT", field) if given.tools_json else []
    if not isinstance(tools, list):
        raise InvalidArgument("BAD_CHAT", field, "is not a list in JSON")
    return tools


def variables_of(chat: runner_pb2.Chat) -> dict[str, Any]:
    """The further variables of a chat's template. Raises InvalidArgument."""
    field = "chat.variables_json"
    variables = parse(chat.variables_json, "BAD_CHAT", field) if chat.variables_json else {}
    if not isinstance(variables, dict):
        raise InvalidArgument("BAD_CHAT", field, "is not an object in JSON")
    if set_here := variables.keys() & {"messages", "tools", "add_generation_prompt"}:
        raise InvalidArgument("BAD_CHAT", field, f"{min(set_here)} has a field of its own")
    return variables


def call_arguments(call: runner_pb2.ToolCall) -> str:
    """A call's arguments as JSON. Models and clients write none in several ways."""
    given = call.arguments_json
    return "{}" if given.strip() in ("", "null") else given


def arguments_field(message: int, call: int) -> str:
    """The path of a tool call's arguments in an item."""
    return f"chat.messages[{message}].tool_calls[{call}].arguments_json"


def _json_of(chat: runner_pb2.Chat) -> Iterator[tuple[str, bytes]]:
    yield "chat.tools_json", chat.tools_json.encode()
    yield "chat.variables_json", chat.variables_json.encode()
    for index, message in enumerate(chat.messages):
        for number, call in enumerate(message.tool_calls):
            yield arguments_field(index, number), call.arguments_json.encode()


def _refuse(_constant: str) -> NoReturn:
    raise ValueError


def _finite(digits: str) -> float:
    """Raises ValueError for numbers beyond the largest float: they would be written as Infinity."""
    number = float(digits)
    if math.isinf(number):
        raise ValueError
    return number


def _too_large(
    reason: str, field: str, max_bytes: int = MAX_BYTES, max_values: int = MAX_VALUES
) -> InvalidArgument:
    limits = f"at most {max_bytes} bytes and {max_values} values (a string, list or object counts as 8)"
    return InvalidArgument(reason, field, f"with all JSON of the chat it is too large: {limits}")
