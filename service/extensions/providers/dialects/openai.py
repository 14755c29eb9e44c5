"""POST /chat/completions and /completions: OpenAI and compatible providers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from quire.v1 import runner_pb2
from quire.v1.sampling_settings import SETTINGS

from service.errors import InvalidArgument
from service.extensions.providers.config import ProviderConfig
from service.extensions.providers.dialects.base import (
    Delta,
    Dialect,
    Fields,
    StreamUpdate,
    ToolCallDelta,
    logprob,
    parsed_json,
    rounded,
    unsupported,
)
from service.extensions.providers.failures import stream_error
from service.text.bounded_json import openai_messages, tools_of

# OpenAI's limit. The gateway itself checks for all stop texts.
MAX_STOPS = 4
_MAX_BIAS = 100.0
# The sampling settings of OpenAI's API. All others are extensions of other providers.
_OWN_SETTINGS = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
_FINISHES = {
    "stop": runner_pb2.FINISH_REASON_STOP,
    "length": runner_pb2.FINISH_REASON_LENGTH,
    "content_filter": runner_pb2.FINISH_REASON_CONTENT_FILTER,
    "tool_calls": runner_pb2.FINISH_REASON_TOOL_CALLS,
    "function_call": runner_pb2.FINISH_REASON_TOOL_CALLS,
}

_TOOL_CHOICES = {
    runner_pb2.TOOL_CHOICE_NONE: "none",
    runner_pb2.TOOL_CHOICE_REQUIRED: "required",
}


def _common_fields(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> dict[str, object]:
    """The fields of a request that both APIs have."""
    body: dict[str, object] = {
        "model": config.model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": rounded(item.sampling.temperature),
    }
    if samples > 1:
        body["n"] = samples
    if item.stop:
        body["stop"] = list(item.stop)[:MAX_STOPS]
    sampling = item.sampling
    for name in _OWN_SETTINGS:
        if sampling.HasField(name):
            body[name] = rounded(getattr(sampling, name))
    if sampling.HasField("seed"):
        body["seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): _bias(bias) for token, bias in sampling.logit_bias.items()}
    return body | _extensions(item, config)


def _bias(bias: float) -> float:
    if bias == -math.inf:
        return -_MAX_BIAS
    if not -_MAX_BIAS <= bias <= _MAX_BIAS:
        field = "sampling.logit_bias"
        raise InvalidArgument("BAD_SAMPLING", field, f"this runtime's provider takes up to {_MAX_BIAS:g}")
    return rounded(bias)


def _extensions(item: runner_pb2.ExecuteItem, config: ProviderConfig) -> dict[str, object]:
    """Fields that only some providers have. Values without an effect are left out."""
    wanted: dict[str, object] = {}
    for setting in SETTINGS:
        if setting.name not in _OWN_SETTINGS and item.sampling.HasField(setting.name):
            value = rounded(getattr(item.sampling, setting.name))
            if value != setting.neutral:
                wanted[f"sampling.{setting.name}"] = value
    if item.stop_token_ids:
        wanted["stop_token_ids"] = list(item.stop_token_ids)
    if item.ignore_eos:
        wanted["ignore_eos"] = True
    if wanted and not config.extensions:
        unsupported(next(iter(wanted)))
    return {field.removeprefix("sampling."): value for field, value in wanted.items()}


def _messages(item: runner_pb2.ExecuteItem) -> list[dict[str, Any]]:
    if item.HasField("text"):
        return [{"role": "user", "content": item.text}]
    messages = openai_messages(item.chat, lambda arguments_json, _: arguments_json)
    for message in messages:
        if "tool_calls" in message:
            message["content"] = message["content"] or None
    return messages


class _OpenAI(Dialect):
    """The common part of both APIs. A subclass reads the choices."""

    takes_n = True

    @staticmethod
    def headers(secret: str) -> Mapping[str, str]:
        return {"authorization": f"Bearer {secret}"} if secret else {}

    def read(self, data: str) -> Sequence[StreamUpdate]:
        if data == "[DONE]":
            self.is_done = True
            return ()
        event = Fields.of_event(data)
        if event.has("error"):
            raise stream_error(self._runtime, event.value("error"))
        deltas: list[StreamUpdate] = [self._delta(choice) for choice in event.objects("choices")]
        if event.has("usage"):
            deltas.append(_usage(event.fields("usage")))
        return deltas

    def _delta(self, choice: Fields) -> Delta:
        raise NotImplementedError


class ChatCompletions(_OpenAI):
    """POST /chat/completions."""

    kind = runner_pb2.RUNTIME_KIND_OPENAI_CHAT
    path = "/chat/completions"
    unsupported_fields = ("tokens", "sampling.penalty_from")

    def __init__(self, runtime: str) -> None:
        super().__init__(runtime)
        # Samples with a refusal.
        self._refusals: set[int] = set()

    @staticmethod
    def body(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> Mapping[str, object]:
        body = _common_fields(item, samples, config)
        body["messages"] = _messages(item)
        body[config.max_tokens_field] = item.max_tokens or config.max_output_tokens
        tools = tools_of(item.chat, parsed_json)
        if tools:
            body["tools"] = tools
        if tools or item.answer_parts.tool_choice == runner_pb2.TOOL_CHOICE_REQUIRED:
            body |= _tool_choice(item.answer_parts)
        if item.logprobs:
            body["logprobs"] = True
        if item.constraint.HasField("json_schema"):
            schema = parsed_json(item.constraint.json_schema, "BAD_CONSTRAINT", "constraint.json_schema")
            named = {"name": "answer", "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    def _delta(self, choice: Fields) -> Delta:
        sample, data = choice.count("index"), choice.fields("delta")
        if data.text("refusal"):
            self._refusals.add(sample)
        finish = _finish(choice)
        if finish and sample in self._refusals:
            finish = runner_pb2.FINISH_REASON_CONTENT_FILTER
        return Delta(
            sample=sample,
            text=data.text("content"),
            logprobs=[
                logprob(token.value("logprob")) for token in choice.fields("logprobs").objects("content")
            ],
            tool_calls=[_tool_call(call) for call in data.objects("tool_calls")],
            # Servers use one of two names.
            thoughts=data.text("reasoning_content") or data.text("reasoning"),
            finish=finish,
        )


def _tool_choice(parts: runner_pb2.AnswerParts) -> dict[str, object]:
    choice: dict[str, object] = {"parallel_tool_calls": False} if parts.single_call else {}
    if parts.function:
        choice["tool_choice"] = {"type": "function", "function": {"name": parts.function}}
    elif parts.tool_choice in _TOOL_CHOICES:
        choice["tool_choice"] = _TOOL_CHOICES[parts.tool_choice]
    return choice


def _tool_call(call: Fields) -> ToolCallDelta:
    function = call.fields("function")
    return ToolCallDelta(
        index=call.count("index"),
        id=call.text("id"),
        name=function.text("name"),
        arguments_json=function.text("arguments"),
    )


class Completions(_OpenAI):
    """POST /completions: continues a prompt without a chat template."""

    kind = runner_pb2.RUNTIME_KIND_OPENAI_COMPLETIONS
    path = "/completions"
    unsupported_fields = (
        "chat", "constraint.json_schema", "sampling.penalty_from", "answer_parts.tool_choice",
    )  # fmt: skip

    @staticmethod
    def body(item: runner_pb2.ExecuteItem, samples: int, config: ProviderConfig) -> Mapping[str, object]:
        body = _common_fields(item, samples, config)
        body["prompt"] = list(item.tokens.token_ids) if item.HasField("tokens") else item.text
        body["max_tokens"] = item.max_tokens or config.max_output_tokens
        if item.logprobs:
            # 0 alternatives: only the log-probabilities of the chosen tokens.
            body["logprobs"] = 0
        return body

    def _delta(self, choice: Fields) -> Delta:
        return Delta(
            sample=choice.count("index"),
            text=choice.text("text"),
            logprobs=[logprob(value) for value in choice.fields("logprobs").items("token_logprobs")],
            finish=_finish(choice),
        )


def _finish(choice: Fields) -> runner_pb2.FinishReason:
    """The finish reason of a choice, if it has ended. An unknown reason counts as STOP."""
    reason = choice.text("finish_reason")
    if not reason:
        return runner_pb2.FINISH_REASON_UNSPECIFIED
    return _FINISHES.get(reason, runner_pb2.FINISH_REASON_STOP)


def _usage(data: Fields) -> runner_pb2.Usage:
    return runner_pb2.Usage(
        input_tokens=data.count("prompt_tokens"),
        output_tokens=data.count("completion_tokens"),
        reasoning_tokens=data.fields("completion_tokens_details").count("reasoning_tokens"),
        cached_tokens=data.fields("prompt_tokens_details").count("cached_tokens"),
    )
