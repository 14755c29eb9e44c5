"""Anthropic's /v1/messages: translates requests to chats, and answers to content blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire.v1 import runner_pb2

from service.extensions.openai.choices import CALL, TEXT, THOUGHTS, Block, Choice
from service.extensions.openai.fields import Fields, array, bad_field, boolean, integer, string, unsupported
from service.extensions.openai.item_fields import MAX_ID
from service.extensions.openai.messages import MAX_TOOLS, text_of
from service.extensions.openai.requests import CompletionRequest, ResolveModel
from service.extensions.openai.translated import BlocksResponse, as_chat
from service.text.bounded_json import MAX_MESSAGES

_NAMES = {
    "stop": "stop_sequences", "parallel_tool_calls": "tool_choice", "tool_choice.function": "tool_choice",
    "reasoning_effort": "output_config.effort", "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}  # fmt: skip
# Fields that mean the same in chats.
_SAME = ("model", "stream", "temperature", "top_p", "top_k")
_IGNORED = frozenset({"metadata", "service_tier", "betas", "cache_control"})
# Fields that only concern caches and citations.
_IGNORED_OF_BLOCKS = frozenset({"cache_control", "citations"})
_IGNORED_OF_TOOLS = _IGNORED_OF_BLOCKS | {"strict", "eager_input_streaming"}
_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_CHOICES = {"auto": "auto", "none": "none", "any": "required"}
_MAX_BLOCKS = 1024
_TEXTS = {"text": "text"}
_DELTAS = {
    THOUGHTS: ("thinking_delta", "thinking"),
    TEXT: ("text_delta", "text"),
    CALL: ("input_json_delta", "partial_json"),
}


def messages(value: object, resolve: ResolveModel, *, needs_max_tokens: bool = True) -> CompletionRequest:
    """Parses a request to /v1/messages. Raises InvalidArgument, and whatever `resolve` raises."""
    fields = Fields(value)
    body: dict[str, Any] = {name: fields.raw(name) for name in _SAME}
    body["max_tokens"] = fields.get("max_tokens", integer, 1, MAX_ID)
    if needs_max_tokens and body["max_tokens"] is None:
        raise bad_field("max_tokens", "is required")
    body["stop"] = fields.raw("stop_sequences")
    names = {**_NAMES}
    body["messages"] = _system(fields, names)
    for role, path, blocks in _turns(fields):
        for message in _assistant_messages(blocks) if role == "assistant" else _user_messages(blocks, role):
            names[f"messages[{len(body['messages'])}]"] = path
            body["messages"].append(message)
    tools = fields.get("tools", array, MAX_TOOLS) or []
    body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    for index in range(len(tools)):
        of_tool = f"tools[{index}].function"
        names |= {of_tool: f"tools[{index}]", f"{of_tool}.parameters": f"tools[{index}].input_schema"}
    if (choice := fields.raw("tool_choice")) is not None:
        body |= _choice(Fields(choice, "tool_choice"))
    if (thinking := fields.raw("thinking")) is not None:
        body["chat_template_kwargs"] = _thinking(Fields(thinking, "thinking"))
    if (config := fields.raw("output_config")) is not None:
        body |= _output(Fields(config, "output_config"))
    fields.refuse_others(_IGNORED, {"mcp_servers": [], "container": None})
    request = as_chat(CompletionRequest, body, resolve, names)
    last = body["messages"][-1]
    # Providers with the same API continue the last message by themselves.
    if request.model.is_local and last["role"] == "assistant" and "tool_calls" not in last:
        request.items[0].chat.continue_last_message = bool(last["content"])
    return request


def _system(fields: Fields, names: dict[str, str]) -> list[dict[str, Any]]:
    given = fields.raw("system")
    if given is None:
        return []
    names["messages[0]"] = "system"
    return [{"role": "system", "content": text_of(given, "system", _TEXTS, _IGNORED_OF_BLOCKS)}]


def _turns(fields: Fields) -> list[tuple[str, str, list[Fields]]]:
    """The role, path and blocks of each turn. Consecutive messages of one role are one turn."""
    turns: list[tuple[str, str, list[Fields]]] = []
    for index, each in enumerate(fields.get("messages", array, MAX_MESSAGES) or []):
        message = Fields(each, f"messages[{index}]")
        role, content = message.raw("role"), message.raw("content")
        message.refuse_others()
        if role not in ("user", "assistant", "system"):
            raise bad_field(message.path("role"), "must be user, assistant or system")
        path = message.path("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": string(content, path)}]
        elif not isinstance(content, list) or len(content) > _MAX_BLOCKS:
            raise bad_field(path, f"must be a string, or a list of at most {_MAX_BLOCKS}")
        blocks = [Fields(block, f"{path}[{n}]") for n, block in enumerate(content)]
        if turns and turns[-1][0] == role:
            turns[-1][2].extend(blocks)
        else:
            turns.append((role, f"messages[{index}]", blocks))
    return turns


def _user_messages(blocks: list[Fields], role: str) -> Iterator[dict[str, Any]]:
    """The messages of a turn of the user or the system: tool results, and the texts before and after them."""
    texts: list[str] = []
    for block in blocks:
        kind = block.raw("type")
        if kind == "text":
            texts.append(block.get("text", string) or "")
        elif kind == "tool_result":
            block.get("is_error", boolean)
            content = block.raw("content")
            result = (
                "" if content is None else text_of(content, block.path("content"), _TEXTS, _IGNORED_OF_BLOCKS)
            )
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block.required("tool_use_id"), "content": result}
        else:
            raise bad_field(block.path("type"), "must be text or tool_result")
        block.refuse_others(_IGNORED_OF_BLOCKS)
    if texts:
        yield {"role": role, "content": "\n".join(texts)}


def _assistant_messages(blocks: list[Fields]) -> Iterator[dict[str, Any]]:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        kind = block.raw("type")
        if kind == "text":
            texts.append(block.get("text", string) or "")
        elif kind == "thinking":
            thoughts.append(block.get("thinking", string) or "")
        elif kind == "tool_use":
            function = {"name": block.required("name"), "arguments": json.dumps(block.raw("input") or {})}
            calls.append({"id": block.required("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise bad_field(block.path("type"), "must be text, thinking, redacted_thinking or tool_use")
        block.refuse_others(_IGNORED_OF_BLOCKS | {"signature", "data"})
    message: dict[str, Any] = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _tool(tool: object, path: str) -> dict[str, Any]:
    fields = Fields(tool, path)
    if fields.raw("type") not in (None, "custom"):
        raise unsupported(fields.path("type"), "must be custom: the server runs no tools")
    function = {"name": fields.required("name"), "parameters": fields.raw("input_schema") or {}}
    if (description := fields.get("description", string)) is not None:
        function["description"] = description
    fields.refuse_others(_IGNORED_OF_TOOLS)
    return {"type": "function", "function": function}


def _choice(fields: Fields) -> dict[str, Any]:
    kind = fields.raw("type")
    body: dict[str, Any] = {"parallel_tool_calls": not fields.get("disable_parallel_tool_use", boolean)}
    if kind == "tool":
        body["tool_choice"] = {"type": "function", "function": {"name": fields.required("name")}}
    elif isinstance(kind, str) and kind in _CHOICES:
        body["tool_choice"] = _CHOICES[kind]
    else:
        raise bad_field(fields.path("type"), "must be auto, any, tool or none")
    fields.refuse_others()
    return body


def _thinking(fields: Fields) -> dict[str, Any] | None:
    """The template variables for thinking. Templates know only whether a model thinks, not how much."""
    kind = fields.raw("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad_field(fields.path("type"), "must be enabled, disabled or adaptive")
    fields.refuse_others({"budget_tokens", "display"})
    return None if kind == "adaptive" else {"enable_thinking": kind == "enabled"}


def _output(fields: Fields) -> dict[str, Any]:
    body = {"reasoning_effort": fields.raw("effort")}
    if (given := fields.raw("format")) is not None:
        form = Fields(given, fields.path("format"))
        if form.raw("type") != "json_schema":
            raise bad_field(form.path("type"), "must be json_schema")
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.raw("schema")}}
        form.refuse_others()
    fields.refuse_others()
    return body


class MessageResponse(BlocksResponse):
    """The response: one message, as content blocks."""

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        self._head = {
            "id": f"msg_{started.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model_of(started),
        }

    def _body(self) -> dict[str, Any]:
        (choice,) = self._choices.values()
        content = [_content(block, is_whole=True) for block in choice.blocks.of_body()]
        return {"content": content, **_end(choice)}

    def _begin_events(self) -> Iterator[dict[str, Any]]:
        end = {"stop_reason": None, "stop_sequence": None}
        message = {**self._head, "content": [], **end, "usage": self.reported_usage()}
        yield {"type": "message_start", "message": message}

    def _block_events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        if what == "begin":
            content = _content(block, is_whole=False)
            yield {"type": "content_block_start", "index": block.index, "content_block": content}
        elif what == "end":
            yield {"type": "content_block_stop", "index": block.index}
        else:
            kind, name = _DELTAS[block.kind]
            yield {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, name: text}}

    def _end_events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": _end(choice), "usage": self.reported_usage()}
        yield {"type": "message_stop"}

    def reported_usage(self) -> dict[str, Any]:
        usage = self.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _end(choice: Choice) -> dict[str, Any]:
    reason = "stop_sequence" if choice.stop else _STOP_REASONS.get(choice.finish or "")
    return {"stop_reason": reason, "stop_sequence": choice.stop or None}


def _content(block: Block, *, is_whole: bool) -> dict[str, Any]:
    """A content block, or the empty one that begins it in a stream."""
    text = block.text if is_whole else ""
    if block.kind == THOUGHTS:
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == TEXT:
        return {"type": "text", "text": text}
    arguments = (block.arguments or {}) if is_whole else {}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}
