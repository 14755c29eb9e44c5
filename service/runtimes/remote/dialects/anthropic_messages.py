"""POST /messages, as Anthropic has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects.base import (
    Delta,
    Fields,
    Reader,
    Said,
    ToolPiece,
    chat_role,
    parsed_json,
    tools_of,
    unsupported,
)
from service.runtimes.remote.failures import broken_off
from service.runtimes.remote.sse import ServerEvent

_VERSION = "2023-06-01"
_FINISHES = {
    "max_tokens": runner_pb2.FINISH_REASON_LENGTH,
    "model_context_window_exceeded": runner_pb2.FINISH_REASON_LENGTH,
    "tool_use": runner_pb2.FINISH_REASON_TOOL_CALLS,
    "refusal": runner_pb2.FINISH_REASON_CONTENT_FILTER,
}
_NOT_THERE = ("min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed")


class AnthropicMessages:
    """See `Dialect`."""

    kind = runner_pb2.RUNTIME_KIND_ANTHROPIC_MESSAGES
    path = "/messages"
    takes_n = False

    def headers(self, secret: str) -> Mapping[str, str]:
        """See `Dialect`."""
        return {"anthropic-version": _VERSION} | ({"x-api-key": secret} if secret else {})

    def body(
        self, item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig
    ) -> Mapping[str, object]:
        """See `Dialect`."""
        assert samples == 1
        _check(item)
        system, messages = _messages(item)
        body: dict[str, object] = {
            "model": config.model,
            "stream": True,
            "max_tokens": item.max_tokens or config.max_output_tokens,
            "temperature": round(item.sampling.temperature, 6),
            "messages": messages,
        }
        if system:
            body["system"] = system
        if item.sampling.HasField("top_p"):
            body["top_p"] = round(item.sampling.top_p, 6)
        if item.sampling.top_k:
            body["top_k"] = item.sampling.top_k
        # Those without a visible character are refused; they are looked for here only.
        stops = [stop for stop in item.stop if stop.strip()]
        if stops:
            body["stop_sequences"] = stops
        tools = [_tool(tool) for tool in tools_of(item.chat)]
        if tools:
            body["tools"] = tools
        return body

    def reader(self, runtime: str) -> Reader:
        """See `Dialect`."""
        return _Reader(runtime)


class _Reader:
    def __init__(self, runtime: str) -> None:
        self._runtime = runtime
        self._usage = runner_pb2.Usage()
        self._tools = 0
        # The tool call that a block of the content is.
        self._tool_of_block: dict[int, int] = {}
        self.is_done = False

    def read(self, event: ServerEvent) -> Sequence[Said]:
        """See `Reader`. Kinds of events that are not known are skipped, as the dialect wants it."""
        said = Fields.of_event(event)
        match said.text("type"):
            case "message_start":
                return [self._count(said.fields("message").fields("usage"))]
            case "content_block_start":
                return self._block(said.count("index"), said.fields("content_block"))
            case "content_block_delta":
                return self._delta(said.count("index"), said.fields("delta"))
            case "message_delta":
                return [_end(said.fields("delta")), self._count(said.fields("usage"))]
            case "message_stop":
                self.is_done = True
            case "error":
                raise broken_off(self._runtime, {"error": said.value("error")})
        return ()

    def _block(self, index: int, block: Fields) -> Sequence[Said]:
        if block.text("type") != "tool_use":
            return [Delta(text=block.text("text"))]
        self._tool_of_block[index] = self._tools
        call = ToolPiece(index=self._tools, id=block.text("id"), name=block.text("name"))
        self._tools += 1
        return [Delta(tool_calls=[call])]

    def _delta(self, index: int, delta: Fields) -> Sequence[Said]:
        tool = self._tool_of_block.get(index)
        if tool is not None and delta.has("partial_json"):
            call = ToolPiece(index=tool, arguments_json=delta.text("partial_json"))
            return [Delta(tool_calls=[call])]
        # What the model thinks comes as another kind of delta, and is not shown.
        return [Delta(text=delta.text("text"))]

    def _count(self, said: Fields) -> runner_pb2.Usage:
        """Numbers are of the whole answer so far; what is not said again stays."""
        if said.has("input_tokens"):
            cached = said.count("cache_read_input_tokens")
            new = said.count("input_tokens") + said.count("cache_creation_input_tokens")
            self._usage.cached_tokens, self._usage.input_tokens = cached, cached + new
        if said.has("output_tokens"):
            self._usage.output_tokens = said.count("output_tokens")
        return self._usage


def _end(delta: Fields) -> Delta:
    reason = delta.text("stop_reason")
    if not reason:
        return Delta()
    finish = _FINISHES.get(reason, runner_pb2.FINISH_REASON_STOP)
    return Delta(finish=finish, stop=delta.text("stop_sequence"))


def _check(item: runner_pb2.ExecuteItem) -> None:
    """Refuses what the dialect has no field for. Raises ProviderFailure."""
    if item.HasField("tokens"):
        unsupported("tokens")
    for name in _NOT_THERE:
        if item.sampling.HasField(name):
            unsupported(f"sampling.{name}")
    if item.sampling.logit_bias:
        unsupported("sampling.logit_bias")
    for name in ("stop_token_ids", "ignore_eos", "logprobs"):
        if getattr(item, name):
            unsupported(name)
    if item.constraint.HasField("json_schema"):
        unsupported("constraint.json_schema")


def _messages(item: runner_pb2.ExecuteItem) -> tuple[str, list[dict[str, object]]]:
    """What the system says, which stands apart, and the messages."""
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
        arguments = parsed_json(call.arguments_json or "{}", "BAD_CHAT", field)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


def _tool(tool: object) -> dict[str, object]:
    """A tool as OpenAI has it becomes one of Anthropic's."""
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
