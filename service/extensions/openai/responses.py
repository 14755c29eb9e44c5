"""The chunks of an execution as a response of OpenAI's API: in one piece, or as events of a stream.

Independent of HTTP. A response in one piece keeps its chunks in serialized form until it is complete: as JSON
log-probabilities would take ten times as much memory, and as Python objects forty times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.v1 import runner_pb2

from service.api.status import from_status
from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.token_texts import TokenTexts, by_text
from service.runtimes.base import SampleKey

_FINISH = {
    runner_pb2.FINISH_REASON_STOP: "stop",
    runner_pb2.FINISH_REASON_LENGTH: "length",
    runner_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
    runner_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    runner_pb2.FINISH_REASON_CANCELLED: "stop",
}

# A token with its log-probability and those of alternatives; see `TokenTexts`.
_Entry = dict[str, Any]
# Memory that a stored chunk takes beside its data.
_CHUNK_BYTES = 48
# In ASCII: some clients split lines at other characters than newlines. Iterators are lists.
to_json = json.JSONEncoder(separators=(",", ":"), default=list).encode


class CompletionResponse:
    """All choices of one request, and their usage."""

    def __init__(self, request: CompletionRequest, token_texts: TokenTexts) -> None:
        self._request = request
        self._token_texts = token_texts
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        # Of a stream: whether its first events were made.
        self._has_begun = False
        keys = [(item.item_id, sample) for item in request.items for sample in range(item.n)]
        self._choices = {key: _Choice(index) for index, key in enumerate(keys)}
        self._usage: dict[SampleKey, runner_pb2.Usage] = {}

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        """Sets the fields that describe the execution. Call before all others."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        if self._request.is_chat and self._request.is_stream:
            kind += ".chunk"
        prefix = "chatcmpl" if self._request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{started.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._request.model.adapter_id or started.model_id or started.runtime,
            "system_fingerprint": started.fingerprint or None,
        }

    # Streams.

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """The event of a chunk, if it has one. Raises QuireError if its sample failed."""
        choice = self._update_choice(chunk)
        if self._request.is_chat and not self._has_begun:
            for each in self._choices.values():
                delta = {"role": "assistant", "content": ""}
                yield self._event({"index": each.index, "delta": delta, "finish_reason": None})
        self._has_begun = True
        entries = self._new_entries(choice, chunk) if self._request.has_logprobs else []
        if not (chunk.text or chunk.tool_calls or entries or choice.finish):
            return
        fields: dict[str, Any] = {"index": choice.index}
        if self._request.is_chat:
            fields["delta"] = {"content": chunk.text} if chunk.text else {}
            if chunk.tool_calls:
                fields["delta"]["tool_calls"] = [_call(call, with_index=True) for call in chunk.tool_calls]
        else:
            fields["text"] = chunk.text
        fields["logprobs"] = self._logprobs(lambda: iter(entries), choice.num_characters)
        yield self._event({**fields, "finish_reason": choice.finish})

    def _new_entries(self, choice: _Choice, chunk: runner_pb2.SampleChunk) -> list[_Entry]:
        """The tokens whose log-probabilities are sent with a chunk, whose text is counted.

        Completions have offsets of texts: a token waits if its text is held back, and may never be sent.
        """
        entries = [*choice.waiting, *self._token_texts.entries(chunk, choice.num_characters)]
        choice.num_characters += len(chunk.text)
        is_ready = self._request.is_chat or choice.finish
        choice.waiting = [] if is_ready else [e for e in entries if e["offset"] > choice.num_characters]
        return entries[: len(entries) - len(choice.waiting)]

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._request.with_usage:
            yield {**self._head, "choices": [], "usage": self.usage()}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "choices": [choice]}
        if self._request.with_usage:
            event["usage"] = None
        return event

    # In one piece.

    def add(self, chunk: runner_pb2.SampleChunk) -> int:
        """Stores a chunk. Returns the bytes that it takes. Raises QuireError if its sample failed."""
        choice = self._update_choice(chunk)
        choice.has_text = choice.has_text or bool(chunk.text)
        choice.has_calls = choice.has_calls or bool(chunk.tool_calls)
        data = chunk.SerializeToString()
        choice.chunks_data.append(data)
        return len(data) + _CHUNK_BYTES

    def pieces(self) -> Iterator[str]:
        """The response as JSON, after all samples have ended. Other tasks can run between its pieces."""
        return _json_pieces({**self._head, "usage": self.usage(), **self._body()})

    def _body(self) -> dict[str, Any]:
        """What follows the head and the usage, with iterators for what may be large."""
        return {"choices": [self._whole(choice) for choice in self._choices.values()]}

    def _whole(self, choice: _Choice) -> dict[str, Any]:
        """A choice, with iterators for what may be large."""
        fields: dict[str, Any] = {"index": choice.index}
        text = _Text(chunk.text for chunk in choice.chunks())
        if self._request.is_chat:
            has_text = choice.has_text or not choice.has_calls
            fields["message"] = {"role": "assistant", "refusal": None, "content": text if has_text else None}
            if choice.has_calls:
                fields["message"]["tool_calls"] = [_call(call) for call in choice.calls()]
        else:
            fields["text"] = text
        num_characters = (
            sum(len(chunk.text) for chunk in choice.chunks()) if self._request.has_logprobs else 0
        )
        logprobs = self._logprobs(lambda: self._entries(choice), num_characters)
        return {**fields, "logprobs": logprobs, "finish_reason": choice.finish}

    # Both.

    def _logprobs(
        self, entries: Callable[[], Iterator[_Entry]], num_characters: int
    ) -> dict[str, Iterator[Any] | None] | None:
        """The log-probabilities of tokens. `num_characters`: of the text so far, theirs included."""
        if not self._request.has_logprobs:
            return None
        if self._request.is_chat:
            return {"content": map(_of_chat, entries()), "refusal": None}
        # One list for each property.
        return {
            "tokens": (entry["token"] for entry in entries()),
            "token_logprobs": (entry["logprob"] for entry in entries()),
            "top_logprobs": map(by_text, entries()),
            # The text ends where a stop text begins, which is several tokens.
            "text_offset": (min(entry["offset"], num_characters) for entry in entries()),
        }

    def _entries(self, choice: _Choice) -> Iterator[_Entry]:
        num_characters = 0
        for chunk in choice.chunks():
            yield from self._token_texts.entries(chunk, num_characters)
            num_characters += len(chunk.text)

    def _update_choice(self, chunk: runner_pb2.SampleChunk) -> _Choice:
        """Stores a chunk's finish reason and usage; returns its choice. Raises QuireError if it failed."""
        key = chunk.item_id, chunk.sample
        choice = self._choices[key]
        if chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR:
            raise from_status(chunk.error)
        if chunk.finish_reason:
            self._usage[key] = chunk.usage
        choice.finish = _FINISH.get(chunk.finish_reason)
        return choice

    def usage(self) -> dict[str, Any]:
        """That of all samples which have ended; a prompt counts once."""
        usages = self._usage.items()
        prompt = sum(usage.input_tokens for (_, sample), usage in usages if not sample)
        output = sum(usage.output_tokens for _, usage in usages)
        cached = sum(usage.cached_tokens for (_, sample), usage in usages if not sample)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for _, u in usages)},
        }


class _Choice:
    """One sample's part of the response."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: str | None = None
        # Of a stream: the characters that were sent, and tokens whose log-probabilities were not.
        self.num_characters = 0
        self.waiting: list[_Entry] = []
        # Of a response in one piece: serialized chunks.
        self.chunks_data: list[bytes] = []
        self.has_text = self.has_calls = False

    def chunks(self) -> Iterator[runner_pb2.SampleChunk]:
        return map(runner_pb2.SampleChunk.FromString, self.chunks_data)

    def calls(self) -> Iterator[runner_pb2.ToolCall]:
        """The tool calls, whose parts are in the chunks."""
        calls: dict[int, list[runner_pb2.ToolCall]] = {}
        for chunk in self.chunks():
            for part in chunk.tool_calls:
                calls.setdefault(part.index, []).append(part)
        for index, parts in calls.items():
            yield runner_pb2.ToolCall(
                index=index,
                id=next((part.id for part in parts if part.id), ""),
                name=next((part.name for part in parts if part.name), ""),
                arguments_json="".join(part.arguments_json for part in parts),
            )


@dataclass(frozen=True, slots=True)
class _Text:
    """A string in parts."""

    parts: Iterator[str]


def _json_pieces(value: object) -> Iterator[str]:
    """JSON of a value in which an iterator is a list, whose entries are one piece each."""
    if isinstance(value, dict):
        separator = "{"
        for name, inner in value.items():
            yield f'{separator}"{name}":'
            yield from _json_pieces(inner)
            separator = ","
        yield "}"
    elif isinstance(value, _Text):
        yield '"'
        for part in value.parts:
            yield to_json(part)[1:-1]
        yield '"'
    elif isinstance(value, Iterator):
        separator = "["
        for entry in value:
            yield separator + to_json(entry)
            separator = ","
        yield "[]" if separator == "[" else "]"
    elif isinstance(value, list) and value:
        separator = "["
        for inner in value:
            yield separator
            yield from _json_pieces(inner)
            separator = ","
        yield "]"
    else:
        yield to_json(value)


def _of_chat(entry: _Entry) -> dict[str, Any]:
    """An entry in the form of chats."""
    return {**_alternative(entry), "top_logprobs": list(map(_alternative, entry["top_logprobs"]))}


def _alternative(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("token", "logprob", "bytes")}


def _call(call: runner_pb2.ToolCall, *, with_index: bool = False) -> dict[str, Any]:
    """A tool call, or a part of one: only its first part has an id and a name."""
    function: dict[str, Any] = {"arguments": call.arguments_json}
    if call.name:
        function["name"] = call.name
    fields: dict[str, Any] = {"index": call.index} if with_index else {}
    if call.id or not with_index:
        fields |= {"id": call.id, "type": "function"}
    return {**fields, "function": function}
