"""Parses chat messages of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.v1 import runner_pb2

from service.extensions.openai.fields import Fields, array, bad_field, string
from service.text.bounded_json import MAX_MESSAGES

MAX_TOOLS = 128
_MAX_PARTS = 1024
_ROLES = {
    "system": runner_pb2.CHAT_ROLE_SYSTEM,
    "developer": runner_pb2.CHAT_ROLE_SYSTEM,
    "user": runner_pb2.CHAT_ROLE_USER,
    "assistant": runner_pb2.CHAT_ROLE_ASSISTANT,
    "tool": runner_pb2.CHAT_ROLE_TOOL,
}
_TEXTS, _REFUSALS = {"text": "text"}, {"refusal": "refusal"}
# Fields of answers that clients send back with the message: sources, and copies of other fields.
_IGNORED_OF_ASSISTANT = frozenset({"annotations", "parsed"})
_IGNORED_OF_CALL = frozenset({"index"})
_IGNORED_OF_FUNCTION = frozenset({"parsed_arguments"})


def parse_messages(values: object, path: str) -> list[runner_pb2.ChatMessage]:
    """Parses the messages of a request. Raises InvalidArgument."""
    if not (found := [] if values is None else array(values, path, MAX_MESSAGES)):
        raise bad_field(path, "must be a list of at least one message")
    return [_message(value, f"{path}[{index}]") for index, value in enumerate(found)]


def _message(value: object, path: str) -> runner_pb2.ChatMessage:
    fields = Fields(value, path)
    role = fields.required("role")
    if role not in _ROLES:
        raise bad_field(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    message = runner_pb2.ChatMessage(role=_ROLES[role], name=fields.get("name", string))
    content = fields.raw("content")
    if content == []:
        raise bad_field(f"{path}.content", "must have at least one part")
    is_assistant = role == "assistant"
    if is_assistant:
        _add_assistant_fields(message, fields)
        if content is None:
            # An answer without text has a refusal in OpenAI's API, and only thoughts in others.
            content = fields.get("refusal", string)
            if content is None and message.HasField("reasoning_content") and not message.tool_calls:
                content = ""
    if role == "tool":
        message.tool_call_id = fields.required("tool_call_id")
    if content is not None:
        message.content = text_of(content, f"{path}.content", _TEXTS | _REFUSALS if is_assistant else _TEXTS)
    elif not message.tool_calls:
        raise bad_field(f"{path}.content", "is required")
    fields.refuse_others(_IGNORED_OF_ASSISTANT if is_assistant else ())
    return message


def _add_assistant_fields(message: runner_pb2.ChatMessage, fields: Fields) -> None:
    for index, call in enumerate(fields.get("tool_calls", array, MAX_TOOLS) or ()):
        message.tool_calls.append(_call(call, index, f"{fields.path('tool_calls')}[{index}]"))
    for name in ("reasoning", "reasoning_content"):
        thoughts = fields.get(name, string)
        if thoughts is not None:
            message.reasoning_content = thoughts


def text_of(value: object, path: str, kinds: Mapping[str, str], ignored: frozenset[str] = frozenset()) -> str:
    """The text of a message's content: a string, or a list of parts, which become lines.

    `kinds`: the allowed types of parts, and the field of each that has its text. Raises InvalidArgument.
    """
    if isinstance(value, str):
        return string(value, path)
    if not isinstance(value, list) or len(value) > _MAX_PARTS:
        raise bad_field(path, f"must be a string, or a list of at most {_MAX_PARTS} parts")
    texts = []
    for index, each in enumerate(value):
        part = Fields(each, f"{path}[{index}]")
        kind = part.raw("type")
        if not isinstance(kind, str) or kind not in kinds:
            raise bad_field(part.path("type"), f"must be {' or '.join(kinds)}")
        text = part.get(kinds[kind], string)
        if text is None:
            raise bad_field(part.path(kinds[kind]), "is required")
        texts.append(text)
        part.refuse_others(ignored)
    return "\n".join(texts)


def _call(value: Any, index: int, path: str) -> runner_pb2.ToolCall:
    fields = Fields(value, path)
    if fields.raw("type") not in (None, "function"):
        raise bad_field(f"{path}.type", "must be function")
    function = Fields(fields.raw("function"), f"{path}.function")
    call = runner_pb2.ToolCall(
        index=index,
        id=fields.required("id"),
        name=function.required("name"),
        arguments_json=function.get("arguments", string) or "",
    )
    fields.refuse_others(_IGNORED_OF_CALL)
    function.refuse_others(_IGNORED_OF_FUNCTION)
    return call
