"""What comes of a batch as OpenAI's API answers it: whole, or chunk by chunk.

Knows nothing of HTTP. What a choice holds until it is answered whole is its chunks as they are on the wire:
in the form of the answer log-probabilities take ten times as much, and as objects of Python forty times.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from quire.v1 import runner_pb2

from service.openai.errors import error_of
from service.openai.requests import Asked
from service.openai.token_texts import TokenTexts
from service.runtimes.execution import SampleKey

_FINISH = {
    runner_pb2.FINISH_REASON_STOP: "stop",
    runner_pb2.FINISH_REASON_LENGTH: "length",
    runner_pb2.FINISH_REASON_CONTENT_FILTER: "content_filter",
    runner_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    runner_pb2.FINISH_REASON_CANCELLED: "stop",
}


# In ASCII: some clients take others than newlines for the ends of lines.
to_json = json.JSONEncoder(separators=(",", ":")).encode


class Answer:
    """All choices of one request, and what they took."""

    def __init__(self, asked: Asked, token_texts: TokenTexts) -> None:
        self._asked = asked
        self._token_texts = token_texts
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        keys = [(item.item_id, sample) for item in asked.items for sample in range(asked.n)]
        self._choices = {key: _Choice(index) for index, key in enumerate(keys)}
        self._usage: dict[SampleKey, runner_pb2.Usage] = {}

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        """It is known who answers: before the first chunk."""
        kind = "chat.completion" if self._asked.is_chat else "text_completion"
        if self._asked.is_chat and self._asked.is_stream:
            kind += ".chunk"
        prefix = "chatcmpl" if self._asked.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{started.request_id}",
            "object": kind,
            "created": self._created,
            "model": started.model_id or started.runtime,
            "system_fingerprint": started.fingerprint or None,
        }

    # As a stream.

    def roles(self) -> Iterator[dict[str, Any]]:
        """What a stream begins with."""
        if self._asked.is_chat:
            for choice in self._choices.values():
                delta = {"role": "assistant", "content": ""}
                yield self._event({"index": choice.index, "delta": delta, "finish_reason": None})

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """What is said of a chunk, if anything. Raises QuireError for the end of a sample that failed."""
        choice = self._ended(chunk)
        entries = list(self._token_texts.entries(chunk)) if self._asked.has_logprobs else []
        if self._asked.is_chat:
            delta: dict[str, Any] = {}
            if chunk.text:
                delta["content"] = chunk.text
            if chunk.tool_calls:
                delta["tool_calls"] = [_call(call, with_index=True) for call in chunk.tool_calls]
            said = {"index": choice.index, "delta": delta}
        else:
            said = {"index": choice.index, "text": chunk.text}
        if chunk.text or chunk.tool_calls or entries or choice.finish:
            logprobs = self._logprobs(choice, entries) if self._asked.has_logprobs else None
            yield self._event({**said, "logprobs": logprobs, "finish_reason": choice.finish})

    def last(self) -> Iterator[dict[str, Any]]:
        """What a stream ends with."""
        if self._asked.with_usage:
            yield {**self._head, "choices": [], "usage": self._used()}

    def _logprobs(self, choice: _Choice, entries: Sequence[_Entry]) -> dict[str, Any]:
        """Of a chunk's tokens, in the form of the answer."""
        if self._asked.is_chat:
            return {"content": [_with_bytes(entry) for entry in entries], "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(choice.num_characters)
            choice.num_characters += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [_top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "choices": [choice]}
        if self._asked.with_usage:
            event["usage"] = None
        return event

    # As a whole.

    def take(self, chunk: runner_pb2.SampleChunk) -> int:
        """Keeps a chunk. Returns how many bytes are held for it; raises QuireError if its sample failed."""
        choice = self._ended(chunk)
        choice.has_text = choice.has_text or bool(chunk.text)
        choice.has_calls = choice.has_calls or bool(chunk.tool_calls)
        kept = chunk.SerializeToString()
        choice.kept.append(kept)
        return len(kept) + _CHUNK_BYTES + _TOKEN_BYTES * len(chunk.logprobs)

    def pieces(self) -> Iterator[str]:
        """The whole answer in JSON, when all samples have ended: in pieces that others can run between."""
        yield to_json({**self._head, "usage": self._used()})[:-1]
        before = ',"choices":['
        for choice in self._choices.values():
            yield f'{before}{{"index":{choice.index},'
            yield from self._message(choice) if self._asked.is_chat else _text(choice)
            yield ',"logprobs":'
            if not self._asked.has_logprobs:
                yield "null"
            elif self._asked.is_chat:
                yield from self._chat_logprobs(choice)
            else:
                yield from self._text_logprobs(choice)
            yield f',"finish_reason":{to_json(choice.finish)}}}'
            before = ","
        yield "]}"

    def _message(self, choice: _Choice) -> Iterator[str]:
        yield '"message":{"role":"assistant","refusal":null,"content":'
        yield from ("null",) if choice.has_calls and not choice.has_text else _characters(choice)
        if choice.has_calls:
            yield f',"tool_calls":{to_json([_call(call) for call in choice.calls()])}'
        yield "}"

    def _chat_logprobs(self, choice: _Choice) -> Iterator[str]:
        before = ""
        yield '{"content":['
        for entry in self._entries(choice):
            yield before + to_json(_with_bytes(entry))
            before = ","
        yield '],"refusal":null}'

    def _text_logprobs(self, choice: _Choice) -> Iterator[str]:
        """The lists of small values are written behind that of large ones, and kept until then."""
        tokens, logprobs, offsets = bytearray(), bytearray(), bytearray()
        offset, before = 0, ""
        yield '{"top_logprobs":['
        for entry in self._entries(choice):
            yield before + to_json(_top(entry))
            before = ","
            comma = b"," if tokens else b""
            tokens += comma + to_json(entry["token"]).encode()
            logprobs += comma + to_json(entry["logprob"]).encode()
            offsets += comma + to_json(offset).encode()
            offset += len(entry["token"])
        for name, values in ("tokens", tokens), ("token_logprobs", logprobs), ("text_offset", offsets):
            yield f'],"{name}":['
            for start in range(0, len(values), _PIECE_BYTES):
                yield values[start : start + _PIECE_BYTES].decode()
        yield "]}"

    def _entries(self, choice: _Choice) -> Iterator[_Entry]:
        for chunk in choice.chunks():
            yield from self._token_texts.entries(chunk)

    # Both.

    def _ended(self, chunk: runner_pb2.SampleChunk) -> _Choice:
        """The choice that a chunk is of, and whether it ends. Raises QuireError if its sample failed."""
        key = chunk.item_id, chunk.sample
        choice = self._choices[key]
        if chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR:
            raise error_of(chunk.error)
        if chunk.finish_reason:
            self._usage[key] = chunk.usage
        choice.finish = _FINISH.get(chunk.finish_reason)
        return choice

    def _used(self) -> dict[str, Any]:
        """What all samples took; a prompt counts once."""
        used = self._usage.items()
        prompt = sum(usage.input_tokens for (_, sample), usage in used if not sample)
        output = sum(usage.output_tokens for _, usage in used)
        cached = sum(usage.cached_tokens for (_, sample), usage in used if not sample)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for _, u in used)},
        }


# A token with its log-probability and those of others, as a chat's answer has it but for the bytes.
_Entry = dict[str, Any]
# What a chunk that is kept takes beside its contents, and in the end what is written of each of its tokens.
_CHUNK_BYTES = 48
_TOKEN_BYTES = 48
_PIECE_BYTES = 1 << 14


class _Choice:
    """What has come of one sample."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.finish: str | None = None
        # Of a stream: of the tokens with log-probabilities that were told.
        self.num_characters = 0
        # Of a whole answer: the chunks, as bytes.
        self.kept: list[bytes] = []
        self.has_text = self.has_calls = False

    def chunks(self) -> Iterator[runner_pb2.SampleChunk]:
        """Those that were kept."""
        return map(runner_pb2.SampleChunk.FromString, self.kept)

    def calls(self) -> Iterator[runner_pb2.ToolCall]:
        """The calls of tools, whose parts are in those."""
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


def _text(choice: _Choice) -> Iterator[str]:
    yield '"text":'
    yield from _characters(choice)


def _characters(choice: _Choice) -> Iterator[str]:
    """All text of a choice, as a string of JSON."""
    yield '"'
    for chunk in choice.chunks():
        yield to_json(chunk.text)[1:-1]
    yield '"'


def _top(entry: _Entry) -> dict[str, float]:
    """As completions have them, by their texts."""
    return {top["token"]: top["logprob"] for top in entry["top_logprobs"]}


def _with_bytes(entry: _Entry) -> dict[str, Any]:
    """An entry as a chat's answer has it."""
    top = [{**other, "bytes": _bytes(other["token"])} for other in entry["top_logprobs"]]
    token = entry["token"]
    return {"token": token, "logprob": entry["logprob"], "bytes": _bytes(token), "top_logprobs": top}


def _bytes(token: str) -> list[int] | None:
    """A token's bytes; None where they are not known, because it is not whole characters."""
    return None if "\ufffd" in token else list(token.encode(errors="replace"))


def _call(call: runner_pb2.ToolCall, *, with_index: bool = False) -> dict[str, Any]:
    """A call of a tool. Of one in pieces, only the first has an id and a name."""
    function: dict[str, Any] = {"arguments": call.arguments_json}
    if call.name:
        function["name"] = call.name
    said: dict[str, Any] = {"index": call.index} if with_index else {}
    if call.id or not with_index:
        said |= {"id": call.id, "type": "function"}
    return {**said, "function": function}
