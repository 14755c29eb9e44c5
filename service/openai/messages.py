"""Messages of a chat as the API has them."""

from __future__ import annotations

from typing import Any

from quire.v1 import runner_pb2

from service.openai.fields import Fields, bad, sound

MAX_TOOLS = 128
_MAX_MESSAGES = 4096
_MAX_PARTS = 1024
_ROLES = {
    "system": runner_pb2.CHAT_ROLE_SYSTEM,
    "developer": runner_pb2.CHAT_ROLE_SYSTEM,
    "user": runner_pb2.CHAT_ROLE_USER,
    "assistant": runner_pb2.CHAT_ROLE_ASSISTANT,
    "tool": runner_pb2.CHAT_ROLE_TOOL,
}
# No chat template that is in use writes it.
_IGNORED = frozenset({"name"})


def chat_of(value: object) -> runner_pb2.Chat:
    """The messages of a request. Raises InvalidArgument."""
    if not isinstance(value, list) or not value:
        raise bad("messages", "must be a list of at least one message")
    if len(value) > _MAX_MESSAGES:
        raise bad("messages", f"has more than {_MAX_MESSAGES} entries")
    return runner_pb2.Chat(messages=[_message(each, f"messages[{i}]") for i, each in enumerate(value)])


def _message(value: object, path: str) -> runner_pb2.ChatMessage:
    fields = Fields(value, path)
    role = fields.needed("role")
    if role not in _ROLES:
        raise bad(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    message = runner_pb2.ChatMessage(role=_ROLES[role])
    if role == "assistant":
        for index, call in enumerate(fields.items("tool_calls", MAX_TOOLS) or ()):
            message.tool_calls.append(_call(call, index, f"{path}.tool_calls[{index}]"))
    if role == "tool":
        message.tool_call_id = fields.needed("tool_call_id")
    content = fields.take("content")
    if content is not None:
        message.content = _text(content, f"{path}.content")
    elif not message.tool_calls:
        raise bad(f"{path}.content", "is needed")
    fields.end(_IGNORED)
    return message


def _text(content: object, path: str) -> str:
    """A text, or the lines that its parts are."""
    if isinstance(content, str):
        return sound(content, path)
    if not isinstance(content, list) or not 0 < len(content) <= _MAX_PARTS:
        raise bad(path, f"must be a string, or a list of 1 to {_MAX_PARTS} parts")
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    fields = Fields(part, path)
    if fields.take("type") != "text":
        raise bad(f"{path}.type", "must be text")
    text = fields.text("text")
    if text is None:
        raise bad(f"{path}.text", "is needed")
    fields.end()
    return text


def _call(value: Any, index: int, path: str) -> runner_pb2.ToolCall:
    fields = Fields(value, path)
    if fields.take("type") not in (None, "function"):
        raise bad(f"{path}.type", "must be function")
    function = Fields(fields.take("function"), f"{path}.function")
    call = runner_pb2.ToolCall(
        index=index,
        id=fields.needed("id"),
        name=function.needed("name"),
        arguments_json=function.text("arguments") or "",
    )
    fields.end()
    function.end()
    return call
