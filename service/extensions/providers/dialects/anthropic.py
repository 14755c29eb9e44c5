"""POST /messages: Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.dialects.base import (
    Delta,
    Dialect,
    Fields,
    StreamUpdate,
    ToolCallDelta,
    parsed_json,
    rounded,
    sampling_fields_but,
)
from service.extensions.providers.failures import stream_error
from service.extensions.providers.prices import MAX_TOKENS
from service.text.bounded_json import call_arguments, chat_role, tools_of

_VERSION = "2023-06-01"
_FINISHES = {
    "max_tokens": runner_pb2.FINISH_REASON_LENGTH,
    "model_context_window_exceeded": runner_pb2.FINISH_REASON_LENGTH,
    "tool_use": runner_pb2.FINISH_REASON_TOOL_CALLS,
    "refusal": runner_pb2.FINISH_REASON_CONTENT_FILTER,
}

_TOOL_CHOICES = {
    runner_pb2.TOOL_CHOICE_NONE: "none",
    runner_pb2.TOOL_CHOICE_REQUIRED: "any",
}


class Messages(Dialect):
    """The Messages API."""

    kind = runner_pb2.RUNTIME_KIND_ANTHROPIC_MESSAGES
    path = "/messages"
    takes_n = False
    unsupported_fields = (
        "tokens", *sampling_fields_but("temperature", "top_p", "top_k"), "stop_token_ids", "ignore_eos",
        "logprobs", "constraint.json_schema",
    )  # fmt: skip

    def __init__(self, runtime: str) -> None:
        super().__init__(runtime)
        self._usage = runner_pb2.Usage()
        self._tools = 0
        # The index of the tool call that each content block has.
        self._tool_of_block: dict[int, int] = {}

    @staticmethod
    def headers(secret: str) -> Mapping[str, str]:
        return {"anthropic-version": _VERSION} | ({"x-api-key": secret} if secret else {})

    @staticmethod
    def body(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> Mapping[str, object]:
        assert samples == 1
        system, messages = _messages(item)
        body: dict[str, object] = {
            "model": config.model,
            "stream": True,
            "max_tokens": item.max_tokens or config.max_output_tokens,
            "messages": messages,
        }
        # 1 is the API's default. Newer models refuse temperature beside top_p, and some any other value.
        if item.sampling.temperature != 1:
            body["temperature"] = rounded(item.sampling.temperature)
        if system:
            body["system"] = system
        if item.sampling.HasField("top_p"):
            body["top_p"] = rounded(item.sampling.top_p)
        if item.sampling.top_k:
            body["top_k"] = item.sampling.top_k
        # The API refuses stop texts of whitespace. The gateway itself checks for all stop texts.
        stops = [stop for stop in item.stop if stop.strip()]
        if stops:
            body["stop_sequences"] = stops
        tools = [_tool(tool) for tool in tools_of(item.chat, parsed_json)]
        if tools:
            body["tools"] = tools
        if tools or item.answer_parts.tool_choice == runner_pb2.TOOL_CHOICE_REQUIRED:
            body |= _tool_choice(item.answer_parts)
        return body

    def read(self, data: str) -> Sequence[StreamUpdate]:
        event = Fields.of_event(data)
        # The API requires clients to ignore unknown events.
        match event.text("type"):
            case "message_start":
                return [self._count(event.fields("message").fields("usage"))]
            case "content_block_start":
                return self._block(event.count("index"), event.fields("content_block"))
            case "content_block_delta":
                return self._delta(event.count("index"), event.fields("delta"))
            case "message_delta":
                return [_end(event.fields("delta")), self._count(event.fields("usage"))]
            case "message_stop":
                self.is_done = True
            case "error":
                raise stream_error(self._runtime, event.value("error"))
        return ()

    def _block(self, index: int, block: Fields) -> Sequence[StreamUpdate]:
        if block.text("type") != "tool_use":
            return [Delta(text=block.text("text"))]
        self._tool_of_block[index] = self._tools
        call = ToolCallDelta(index=self._tools, id=block.text("id"), name=block.text("name"))
        self._tools += 1
        return [Delta(tool_calls=[call])]

    def _delta(self, index: int, delta: Fields) -> Sequence[StreamUpdate]:
        tool = self._tool_of_block.get(index)
        if tool is not None and delta.has("partial_json"):
            call = ToolCallDelta(index=tool, arguments_json=delta.text("partial_json"))
            return [Delta(tool_calls=[call])]
        return [Delta(text=delta.text("text"), thoughts=delta.text("thinking"))]

    def _count(self, data: Fields) -> runner_pb2.Usage:
        """Updates the usage. Counts are cumulative; a count that is missing stays the same."""
        if data.has("input_tokens"):
            cached = data.count("cache_read_input_tokens")
            new = data.count("input_tokens") + data.count("cache_creation_input_tokens")
            self._usage.cached_tokens = cached
            self._usage.input_tokens = min(cached + new, MAX_TOKENS)
        if data.has("output_tokens"):
            self._usage.output_tokens = data.count("output_tokens")
        return self._usage


def _end(delta: Fields) -> Delta:
    reason = delta.text("stop_reason")
    if not reason:
        return Delta()
    finish = _FINISHES.get(reason, runner_pb2.FINISH_REASON_STOP)
    return Delta(finish=finish, stop=delta.text("stop_sequence"))


def _messages(item: runner_pb2.ExecuteItem) -> tuple[str, list[dict[str, object]]]:
    """The system prompt, which is a separate field, and the messages."""
    if item.HasField("text"):
        return "", [{"role": "user", "content": item.text}]
    system: list[str] = []
    messages: list[dict[str, object]] = []
    for index, message in enumerate(item.chat.messages):
        role = chat_role(message, index)
        if role == "system":
            system.append(message.content)
        elif role == "tool":
            result = {
                "type": "tool_result",
                "tool_use_id": message.tool_call_id,
                "content": message.content,
            }
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"role": role, "content": _content(message, index)})
    return "\n\n".join(system), messages


def _content(message: runner_pb2.ChatMessage, index: int) -> object:
    if not message.tool_calls:
        return message.content
    blocks: list[dict[str, object]] = []
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        field = f"chat.messages[{index}].tool_calls"
        arguments = parsed_json(call_arguments(call), "BAD_CHAT", field)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _tool_choice(parts: runner_pb2.AnswerParts) -> dict[str, object]:
    choice: dict[str, object] = {"type": _TOOL_CHOICES.get(parts.tool_choice, "auto")}
    if parts.function:
        choice = {"type": "tool", "name": parts.function}
    if parts.single_call and parts.tool_choice != runner_pb2.TOOL_CHOICE_NONE:
        choice["disable_parallel_tool_use"] = True
    return {} if choice == {"type": "auto"} else {"tool_choice": choice}


def _tool(tool: object) -> dict[str, object]:
    """Converts a tool from OpenAI's format."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise InvalidArgument("BAD_CHAT", "chat.tools_json", "a tool needs its function")
    written: dict[str, object] = {
        "name": function.get("name"),
        "input_schema": function.get("parameters", {"type": "object"}),
    }
    if "description" in function:
        written["description"] = function["description"]
    return written
