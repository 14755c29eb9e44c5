"""POST /chat/completions, of OpenAI and of the many that are compatible with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.v1 import runner_pb2

from service.runtimes.remote.config import ProviderConfig
from service.runtimes.remote.dialects import openai
from service.runtimes.remote.dialects.base import (
    Delta,
    Fields,
    ToolPiece,
    chat_role,
    logprob,
    parsed_json,
    tools_of,
    unsupported,
)


class OpenAIChat:
    """See `Dialect`."""

    kind = runner_pb2.RUNTIME_KIND_OPENAI_CHAT
    path = "/chat/completions"
    takes_n = True

    def headers(self, secret: str) -> Mapping[str, str]:
        """See `Dialect`."""
        return openai.headers(secret)

    def body(
        self, item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig
    ) -> Mapping[str, object]:
        """See `Dialect`."""
        if item.HasField("tokens"):
            unsupported("tokens")
        body = openai.common_fields(item, samples, config)
        body["messages"] = _messages(item)
        body[config.max_tokens_field] = item.max_tokens or config.max_output_tokens
        tools = tools_of(item.chat)
        if tools:
            body["tools"] = tools
        if item.logprobs:
            body["logprobs"] = True
        if item.constraint.HasField("json_schema"):
            schema = parsed_json(item.constraint.json_schema, "BAD_CONSTRAINT", "constraint.json_schema")
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    def reader(self, runtime: str) -> openai.OpenAIReader:
        """See `Dialect`."""
        return _Reader(runtime)


class _Reader(openai.OpenAIReader):
    def __init__(self, runtime: str) -> None:
        super().__init__(runtime)
        # Samples in which the model says that it will not answer, which is no answer.
        self._refused: set[int] = set()

    def delta(self, choice: Fields) -> Delta:
        """See `OpenAIReader`."""
        sample, said = choice.count("index"), choice.fields("delta")
        if said.text("refusal"):
            self._refused.add(sample)
        finish = openai.finish_of(choice)
        if finish and sample in self._refused:
            finish = runner_pb2.FINISH_REASON_CONTENT_FILTER
        return Delta(
            sample=sample,
            text=said.text("content"),
            logprobs=[
                logprob(token.value("logprob")) for token in choice.fields("logprobs").objects("content")
            ],
            tool_calls=[_tool_call(call) for call in said.objects("tool_calls")],
            finish=finish,
        )


def _tool_call(call: Fields) -> ToolPiece:
    function = call.fields("function")
    return ToolPiece(
        index=call.count("index"),
        id=call.text("id"),
        name=function.text("name"),
        arguments_json=function.text("arguments"),
    )


def _messages(item: runner_pb2.ExecuteItem) -> list[dict[str, Any]]:
    if item.HasField("text"):
        return [{"role": "user", "content": item.text}]
    messages = []
    for index, message in enumerate(item.chat.messages):
        written: dict[str, Any] = {"role": chat_role(message, index), "content": message.content}
        if message.tool_calls:
            written["content"] = message.content or None
            written["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments_json},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            written["tool_call_id"] = message.tool_call_id
        messages.append(written)
    return messages
