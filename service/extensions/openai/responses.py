"""Makes a response of OpenAI's API from the chunks of an execution: in one piece, or as a stream of events.

Independent of HTTP. A response in one piece keeps its chunks in serialized form until it is complete: as JSON
log-probabilities would take ten times as much memory, and as Python objects forty times.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.v1 import runner_pb2

from service.api.status import from_status
from service.extensions.openai.choices import CALL, TEXT, THOUGHTS, Choice
from service.extensions.openai.errors import of_prompt
from service.extensions.openai.prompts import Prompt, prompt_logprobs
from service.extensions.openai.requests import CompletionRequest
from service.extensions.openai.token_texts import TokenTexts, by_text
from service.runtimes.base import SampleKey
from service.text.output_parser import Part

# A token with its log-probability and its alternatives; see `TokenTexts`.
_Entry = dict[str, Any]
# Memory of a stored chunk in addition to its data.
_CHUNK_BYTES = 48
# ASCII only, because some clients split lines at characters other than newlines. Iterators become lists.
to_json = json.JSONEncoder(separators=(",", ":"), default=list).encode


def event(value: Any) -> str:
    """Encodes a server-sent event."""
    return f"data: {to_json(value)}\n\n"


class CompletionResponse:
    """The response to one request: its choices and their usage.

    Attributes:
        frame: Encodes an event of a stream. `last_frame`: the end of a stream.
    """

    frame = staticmethod(event)
    last_frame = "data: [DONE]\n\n"

    def __init__(
        self, request: CompletionRequest, token_texts: TokenTexts, prompts: Sequence[Prompt] = ()
    ) -> None:
        """`prompts`: empty if nothing of them is returned."""
        self._request = request
        self._token_texts = token_texts
        self._prompts = prompts
        self._created = int(time.time())
        self._head: dict[str, Any] = {}
        # For a stream: whether its first events were made.
        self._has_begun = False
        keys = [(item.item_id, sample) for item in request.items for sample in range(item.n)]
        self._choices = {key: self._choice(index) for index, key in enumerate(keys)}
        self._usage: dict[SampleKey, runner_pb2.Usage] = {}

    def _choice(self, index: int) -> Choice:
        return Choice(index, len(self._prompt(index).text) if self._request.echo else 0)

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        """Sets the fields that describe the execution. Must be called first."""
        kind = "chat.completion" if self._request.is_chat else "text_completion"
        if self._request.is_chat and self._request.is_stream:
            kind += ".chunk"
        prefix = "chatcmpl" if self._request.is_chat else "cmpl"
        self._head = {
            "id": f"{prefix}-{started.request_id}",
            "object": kind,
            "created": self._created,
            "model": self._model_of(started),
            "system_fingerprint": started.fingerprint or None,
        }

    def _model_of(self, started: runner_pb2.ExecutionStarted) -> str:
        return self._request.model.adapter_id or started.model_id or started.runtime

    # Streams.

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        """The events of a chunk, maybe none. Raises QuireError if its sample failed."""
        chunk = self._shown(chunk)
        choice, parts = self._update_choice(chunk)
        yield from self._first_events(choice)
        entries = self._new_entries(choice, chunk) if self._request.has_logprobs else []
        deltas = list(self._deltas(parts))
        token_ids = list(chunk.token_ids) if self._request.with_token_ids else []
        if not (deltas or entries or token_ids or choice.finish):
            return
        last = max(0, len(deltas) - 1)
        for number, delta in enumerate(deltas or [self._delta()]):
            fields = {"index": choice.index, **delta}
            fields["logprobs"] = self._logprobs(functools.partial(iter, entries), choice.num_characters)
            if self._request.with_token_ids:
                fields["token_ids"] = token_ids
            yield self._event({**fields, "finish_reason": choice.finish if number == last else None})
            # Only the first event of the chunk has them.
            entries, token_ids = [], []

    def _first_events(self, choice: Choice) -> Iterator[dict[str, Any]]:
        """The events before all others: the role of a chat; the prompt of a completion with echo."""
        if self._request.is_chat and not self._has_begun:
            for each in self._choices.values():
                delta = self._delta(role="assistant", content="")
                yield self._event({"index": each.index, **delta, "finish_reason": None}) | self._chat_fields()
        self._has_begun = True
        if self._request.is_chat or choice.has_begun:
            return
        choice.has_begun = True
        if self._request.echo or self._request.with_token_ids:
            prompt = self._prompt(choice.index)
            logprobs = self._logprobs(functools.partial(self._prompt_entries, choice), choice.begin)
            fields = {"index": choice.index, "text": prompt.text, "logprobs": logprobs}
            yield self._event({**fields, **self._prompt_fields(choice), "finish_reason": None})

    def _deltas(self, parts: list[Part]) -> Iterator[dict[str, Any]]:
        """The delta of each part."""
        if not self._request.is_chat:
            if text := "".join(part.content for part in parts):
                yield self._delta(content=text)
            return
        for part in parts:
            if part.content:
                yield self._delta(content=part.content)
            elif part.thoughts and self._request.with_thoughts:
                yield self._delta(reasoning_content=part.thoughts)
            elif part.begun:
                call_id, name = part.begun
                function = {"arguments": "", "name": name}
                call = {"index": part.index, "id": call_id, "type": "function", "function": function}
                yield self._delta(tool_calls=[call])
            elif part.arguments:
                call = {"index": part.index, "function": {"arguments": part.arguments}}
                yield self._delta(tool_calls=[call])

    def _delta(self, **fields: Any) -> dict[str, Any]:
        """New content in the form of the route."""
        return {"delta": fields} if self._request.is_chat else {"text": fields.get("content", "")}

    def _new_entries(self, choice: Choice, chunk: runner_pb2.SampleChunk) -> list[_Entry]:
        """The tokens whose log-probabilities are sent with a chunk. Counts the chunk's text.

        Completions return text offsets, so a token waits while its text is held back, and may never be sent.
        """
        new = self._token_texts.entries(chunk, choice.num_characters, choice.begin)
        entries = [*choice.waiting, *new]
        choice.num_characters += len(chunk.text)
        is_ready = self._request.is_chat or choice.finish
        choice.waiting = [] if is_ready else [e for e in entries if e["offset"] > choice.num_characters]
        return entries[: len(entries) - len(choice.waiting)]

    def last_events(self) -> Iterator[dict[str, Any]]:
        if self._request.with_usage:
            yield {**self._head, "choices": [], "usage": self.reported_usage()}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        event = {**self._head, "choices": [choice]}
        if self._request.with_usage:
            event["usage"] = self.reported_usage() if self._request.usage_in_all else None
        return event

    # Responses in one piece.

    def add(self, chunk: runner_pb2.SampleChunk) -> int:
        """Stores a chunk. Returns its size in memory in bytes. Raises QuireError if its sample failed."""
        chunk = self._shown(chunk)
        choice, parts = self._update_choice(chunk)
        if self._request.is_chat:
            choice.blocks.keep(parts)
        data = chunk.SerializeToString()
        choice.chunks_data.append(data)
        return len(data) + _CHUNK_BYTES

    def pieces(self) -> Iterator[str]:
        """The response as JSON, after the end of all samples. Other tasks can run between the pieces."""
        head = {**self._head, "usage": self.reported_usage()}
        return json_pieces({**head, **self._chat_fields(), **self._body()})

    def _body(self) -> dict[str, Any]:
        """The fields after the head and the usage, with iterators for large ones."""
        return {"choices": [self._whole(choice) for choice in self._choices.values()]}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        """A choice, with iterators for large fields."""
        fields: dict[str, Any] = {"index": choice.index}
        num_characters = 0
        if self._request.is_chat:
            fields["message"] = self._message(choice)
        else:
            fields["text"] = _Text(self._texts(choice))
            if self._request.has_logprobs:
                num_characters = choice.begin + sum(len(chunk.text) for chunk in choice.chunks())
            fields |= self._prompt_fields(choice)
        if self._request.with_token_ids:
            fields["token_ids"] = (token_id for chunk in choice.chunks() for token_id in chunk.token_ids)
        logprobs = self._logprobs(lambda: self._entries(choice), num_characters)
        fields |= {"logprobs": logprobs, "finish_reason": choice.finish}
        return {**fields, **self._routed_experts(choice)}

    def _message(self, choice: Choice) -> dict[str, Any]:
        content, thoughts = map(choice.blocks.texts, (TEXT, THOUGHTS))
        calls = [block for block in choice.blocks.all if block.kind == CALL]
        text = _Text(iter(content)) if content or not calls else None
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": text}
        if thoughts and self._request.with_thoughts:
            message["reasoning_content"] = _Text(iter(thoughts))
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.text},
                }
                for call in calls
            ]
        return message

    def _texts(self, choice: Choice) -> Iterator[str]:
        if self._request.echo:
            yield self._prompt(choice.index).text
        yield from (chunk.text for chunk in choice.chunks())

    # Fields about prompts.

    def _prompt(self, index: int) -> Prompt:
        """The prompt of a choice. All items have the same number of samples."""
        return self._prompts[index // self._request.items[0].n]

    def _chat_fields(self) -> dict[str, Any]:
        """The fields about the prompt at the top level of a chat's response."""
        return self._prompt_fields(next(iter(self._choices.values()))) if self._request.is_chat else {}

    def _prompt_fields(self, choice: Choice) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._request.num_prompt_top is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt(choice.index), self._token_texts)
        if self._request.with_token_ids:
            fields["prompt_token_ids"] = iter(self._prompt(choice.index).token_ids)
        return fields

    def _routed_experts(self, choice: Choice, of_stream: Sequence[bytes] | None = None) -> dict[str, Any]:
        """`routed_experts`, if requested. `of_stream`: rows of generated tokens. None: from stored chunks."""
        wanted = self._request.experts
        if wanted is None:
            return {}
        prompt = self._prompt(choice.index)
        generated: Iterable[bytes] = of_stream or ()
        if of_stream is None:
            generated = (experts for chunk in choice.chunks() for experts in chunk.experts)
        # The first generated row is of the prompt's last token.
        before, num_prompt = prompt.experts(wanted.start), len(prompt.token_ids)
        after = itertools.islice(generated, int(wanted.start == num_prompt), None)
        num_rows = max(0, num_prompt - wanted.start - 1 + choice.num_tokens)
        string = _Text if of_stream is None else "".join
        return {"routed_experts": wanted.encoded(itertools.chain(before, after), num_rows, string)}

    def _prompt_entries(self, choice: Choice) -> Iterator[_Entry]:
        prompt = self._prompt(choice.index)
        if self._request.echo and prompt.scored is not None:
            yield from self._token_texts.of_prompt(prompt.token_ids, prompt.scored)

    # Both forms.

    def _logprobs(
        self, entries: Callable[[], Iterator[_Entry]], num_characters: int
    ) -> dict[str, Iterator[Any] | None] | None:
        """The log-probabilities of tokens. `num_characters`: the length of the text up to their end."""
        if not self._request.has_logprobs:
            return None
        if self._request.is_chat:
            return {"content": map(_chat_entry, entries()), "refusal": None}
        # Completions have one list for each property.
        ids = {}
        if self._request.with_token_ids:
            ids["top_token_ids"] = (by_text(entry, "id") for entry in entries())
        return {
            "tokens": (entry["token"] for entry in entries()),
            "token_logprobs": (entry["logprob"] for entry in entries()),
            "top_logprobs": (by_text(entry, "logprob") for entry in entries()),
            **ids,
            # A stop text of several tokens is cut off the text, so offsets are limited to its end.
            "text_offset": (min(entry["offset"], num_characters) for entry in entries()),
        }

    def _entries(self, choice: Choice) -> Iterator[_Entry]:
        if self._request.echo:
            yield from self._prompt_entries(choice)
        num_characters = choice.begin
        for chunk in choice.chunks():
            yield from self._token_texts.entries(chunk, num_characters, choice.begin)
            num_characters += len(chunk.text)

    def _shown(self, chunk: runner_pb2.SampleChunk) -> runner_pb2.SampleChunk:
        """The chunk as it is returned. With `echo_only` the token generated after the prompt is left out."""
        if not self._request.echo_only or chunk.HasField("error"):
            return chunk
        shown = runner_pb2.SampleChunk(item_id=chunk.item_id, sample=chunk.sample)
        if chunk.finish_reason:
            shown.finish_reason = runner_pb2.FINISH_REASON_LENGTH
            shown.usage.CopyFrom(chunk.usage)
            shown.usage.output_tokens = 0
        return shown

    def _update_choice(self, chunk: runner_pb2.SampleChunk) -> tuple[Choice, list[Part]]:
        """Updates choice and usage from a chunk. Returns the choice and the parts. Raises QuireError."""
        key = chunk.item_id, chunk.sample
        choice = self._choices[key]
        if chunk.finish_reason == runner_pb2.FINISH_REASON_ERROR:
            with of_prompt(int(chunk.item_id), len(self._request.items), self._request.param_of):
                raise from_status(chunk.error)
        if chunk.finish_reason:
            self._usage[key] = chunk.usage
        return choice, choice.parts(chunk)

    def reported_usage(self) -> dict[str, Any]:
        """The usage in the form of the route."""
        return self.usage()

    def usage(self) -> dict[str, Any]:
        """The usage of all samples so far. A prompt counts once."""
        usages = self._usage.items()
        thoughts = sum(usage.reasoning_tokens for _, usage in usages)
        prompt = sum(usage.input_tokens for (_, sample), usage in usages if not sample)
        output = sum(usage.output_tokens for _, usage in usages)
        for index, (key, choice) in enumerate(self._choices.items()):
            if key not in self._usage:
                output += choice.num_tokens
                prompt += len(self._prompt(index).token_ids) if self._prompts and not key[1] else 0
        cached = sum(usage.cached_tokens for (_, sample), usage in usages if not sample)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": thoughts, **_draft_usage(self._usage.values())},
        }


@dataclass(frozen=True, slots=True)
class _Text:
    """A string in parts."""

    parts: Iterator[str]


def json_pieces(value: object) -> Iterator[str]:
    """Encodes a value as JSON in pieces. An iterator becomes a list, with a piece for each entry."""
    if isinstance(value, dict) and value:
        separator = "{"
        for name, inner in value.items():
            yield f"{separator}{to_json(name)}:"
            yield from json_pieces(inner)
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
            yield from json_pieces(inner)
            separator = ","
        yield "]"
    else:
        yield to_json(value)


def _draft_usage(usages: Iterable[runner_pb2.Usage]) -> dict[str, int]:
    """The numbers of accepted and rejected draft tokens. Empty without drafts."""
    usages = list(usages)
    drafted = sum(usage.draft_tokens for usage in usages)
    accepted = sum(usage.accepted_draft_tokens for usage in usages)
    if not drafted:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}


def _chat_entry(entry: _Entry) -> dict[str, Any]:
    """A token's entry in the form of chats."""
    return {**_alternative(entry), "top_logprobs": list(map(_alternative, entry["top_logprobs"]))}


def _alternative(token: Mapping[str, Any]) -> dict[str, Any]:
    return {name: token[name] for name in ("token", "logprob", "bytes")}
