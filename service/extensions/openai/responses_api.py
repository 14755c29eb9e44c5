"""OpenAI's /v1/responses: translates requests to chats, and answers to output items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from quire.v1 import runner_pb2

from service.auth.authenticator import current_tenant_name
from service.extensions.openai.choices import CALL, TEXT, THOUGHTS, Block, Choice
from service.extensions.openai.fields import Fields, array, bad_field, boolean, string, unsupported
from service.extensions.openai.messages import MAX_TOOLS, text_of
from service.extensions.openai.requests import IGNORED, CompletionRequest, ResolveModel
from service.extensions.openai.stored_responses import StoredResponses, not_found
from service.extensions.openai.translated import CUT, BlocksResponse, as_chat
from service.text.bounded_json import MAX_MESSAGES

Keep: TypeAlias = Callable[[Mapping[str, Any]], None]
_NAMES = {
    "messages": "input", "max_completion_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort",
    "response_format": "text.format", "response_format.json_schema": "text.format",
    "tool_choice.function": "tool_choice",
}  # fmt: skip
# Fields that mean the same in chats.
_SAME = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", "seed", "top_k", "min_p")
_NEUTRAL = {"truncation": "disabled", "background": False, "include": [], "top_logprobs": 0}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_IGNORED_OF_TEXTS = frozenset({"annotations", "logprobs"})
_IGNORED_OF_ITEMS = frozenset({"id", "status", "phase"})
_EVENTS = {
    THOUGHTS: "response.reasoning_text",
    TEXT: "response.output_text",
    CALL: "response.function_call_arguments",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(CompletionRequest):
    """A valid request to /v1/responses.

    Attributes:
        given: Fields of the request that the response repeats.
        keep: Called with the complete response, to store it.
    """

    given: Mapping[str, Any]
    keep: Keep


def earlier_messages(value: object, stored: StoredResponses) -> bytes:
    """The stored messages that a request continues, as JSON. Empty: none. Raises InvalidArgument."""
    previous_id = value.get("previous_response_id") if isinstance(value, dict) else None
    if previous_id is None:
        return b""
    found = stored.find(current_tenant_name(), string(previous_id, "previous_response_id"))
    if found is None:
        raise not_found("PREVIOUS_RESPONSE_NOT_FOUND", "previous_response_id")
    return found.messages


def responses(
    value: object,
    resolve: ResolveModel,
    stored: StoredResponses,
    earlier: Sequence[dict[str, Any]] = (),
) -> ResponsesRequest:
    """Parses a request to /v1/responses. `earlier`: the messages that it continues.

    Raises InvalidArgument, and whatever `resolve` raises.
    """
    fields = Fields(value)
    tenant = current_tenant_name()
    body: dict[str, Any] = {name: fields.raw(name) for name in _SAME}
    body["max_completion_tokens"] = fields.raw("max_output_tokens")
    instructions = fields.get("instructions", string)
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages = [*system, *earlier]
    names = {**_NAMES, **{f"messages[{index}]": "previous_response_id" for index in range(len(messages))}}
    if system:
        names["messages[0]"] = "instructions"
    _add_items(messages, _input(fields), names)
    body["messages"] = [*messages]
    tools = fields.get("tools", array, MAX_TOOLS) or []
    body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names |= {f"tools[{index}].function": f"tools[{index}]" for index in range(len(tools))}
    choice = fields.raw("tool_choice")
    body["tool_choice"] = _choice(Fields(choice, "tool_choice")) if isinstance(choice, dict) else choice
    if (text := fields.raw("text")) is not None:
        body["response_format"] = _format(Fields(text, "text"))
    if (reasoning := fields.raw("reasoning")) is not None:
        of_reasoning = Fields(reasoning, "reasoning")
        body["reasoning_effort"] = of_reasoning.raw("effort")
        of_reasoning.refuse_others({"summary", "generate_summary"})
    for name in ("conversation", "prompt"):
        if fields.raw(name) is not None:
            raise unsupported(name, "is not stored: send it as input, or name the response before")
    is_kept = fields.get("store", boolean) is not False
    given = _repeated(fields)
    fields.refuse_others(IGNORED | {"stream_options"}, _NEUTRAL)

    def keep(response: Mapping[str, Any]) -> None:
        if is_kept:
            _add_items(messages, response["output"])
            stored.keep(tenant, messages[len(system) :], response)

    return as_chat(ResponsesRequest, body, resolve, names, given=given, keep=keep)


def _repeated(fields: Fields) -> dict[str, Any]:
    """The fields that the response repeats, with the defaults of those that are absent."""
    return {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": fields.raw("max_output_tokens"),
        "parallel_tool_calls": fields.raw("parallel_tool_calls") is not False,
        "temperature": fields.raw("temperature"),
        "top_p": fields.raw("top_p"),
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": fields.raw("tools") or [],
        "text": fields.raw("text") or {"format": {"type": "text"}},
        "reasoning": fields.raw("reasoning") or {"effort": None, "summary": None},
        "metadata": fields.raw("metadata") or {},
        "previous_response_id": fields.get("previous_response_id", string),
        "store": fields.raw("store") is not False,
    }


def _input(fields: Fields) -> list[Any]:
    """The input items of a request. A text is one message."""
    given = fields.raw("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return fields.get("input", array, MAX_MESSAGES) or []


def _add_items(
    messages: list[dict[str, Any]], items: Sequence[Any], names: dict[str, str] | None = None
) -> None:
    """Adds items of a request or response as messages. `names`: receives the item's path of each message."""
    for index, each in enumerate(items):
        path = f"input[{index}]"
        item = Fields(each, path)
        _add_item(messages, item)
        item.refuse_others(_IGNORED_OF_ITEMS)
        if names is not None:
            message = f"messages[{len(messages) - 1}]"
            names.setdefault(message, path)
            if calls := messages[-1].get("tool_calls"):
                names.setdefault(f"{message}.tool_calls[{len(calls) - 1}].function", path)


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    """Adds an item as a message, or to the last message if both are the assistant's."""
    kind = item.raw("type")
    if kind in (None, "message"):
        role = item.required("role")
        content = text_of(item.raw("content"), item.path("content"), _TEXTS, _IGNORED_OF_TEXTS)
        if role == "assistant" and _is_open(messages, "content"):
            messages[-1]["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "reasoning":
        item.raw("summary"), item.raw("encrypted_content")
        content = text_of(item.raw("content") or [], item.path("content"), {"reasoning_text": "text"})
        messages.append({"role": "assistant", "reasoning_content": content})
    elif kind == "function_call":
        function = {"name": item.required("name"), "arguments": item.get("arguments", string) or ""}
        call = {"id": item.required("call_id"), "type": "function", "function": function}
        if not _is_open(messages, ""):
            messages.append({"role": "assistant"})
        if item.raw("status") == "incomplete":
            # An incomplete call becomes content, because its arguments may not be JSON.
            messages[-1]["content"] = messages[-1].get("content", "") + function["arguments"]
        else:
            messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = text_of(item.raw("output"), item.path("output"), _TEXTS)
        messages.append({"role": "tool", "tool_call_id": item.required("call_id"), "content": content})
    else:
        text = "must be message, reasoning, function_call or function_call_output"
        raise bad_field(item.path("type"), text)


def _is_open(messages: list[dict[str, Any]], name: str) -> bool:
    """Whether the last message is the assistant's and does not have field `name` yet."""
    return bool(messages) and messages[-1]["role"] == "assistant" and name not in messages[-1]


def _tool(tool: object, path: str) -> dict[str, Any]:
    fields = Fields(tool, path)
    if fields.raw("type") != "function":
        raise unsupported(fields.path("type"), "must be function: the server runs no tools")
    names = ("name", "description", "parameters", "strict")
    function = {name: fields.raw(name) for name in names if fields.raw(name) is not None}
    fields.refuse_others()
    return {"type": "function", "function": function}


def _choice(fields: Fields) -> dict[str, Any]:
    if fields.raw("type") != "function":
        raise unsupported(fields.path("type"), "must be function")
    name = fields.required("name")
    fields.refuse_others()
    return {"type": "function", "function": {"name": name}}


def _format(fields: Fields) -> dict[str, Any] | None:
    given = fields.raw("format")
    fields.refuse_others(neutral={"verbosity": "medium"})
    if given is None:
        return None
    form = Fields(given, fields.path("format"))
    if form.raw("type") != "json_schema":
        return dict(given)
    return {
        "type": "json_schema",
        "json_schema": {name: each for name, each in given.items() if name != "type"},
    }


class ResponsesResponse(BlocksResponse):
    """The response, as output items."""

    _request: ResponsesRequest
    _num_events = 0

    def begin(self, started: runner_pb2.ExecutionStarted) -> None:
        self._head = {
            "id": f"resp_{started.request_id}",
            "object": "response",
            "created_at": self._created,
            "model": self._model_of(started),
            "error": None,
            "background": False,
            "truncation": "disabled",
            **self._request.given,
        }
        self._number = started.request_id

    def _body(self) -> dict[str, Any]:
        """The fields of the whole response after its head. Stores the response."""
        (choice,) = self._choices.values()
        choice.blocks.end(is_cut=choice.finish in CUT)
        body = {"output": [self._item(block) for block in choice.blocks.of_body()], **self._status()}
        self._request.keep({**self._head, **body, "usage": self.reported_usage()})
        return body

    def events(self, chunk: runner_pb2.SampleChunk) -> Iterator[dict[str, Any]]:
        for number, event in enumerate(super().events(chunk), self._num_events):
            self._num_events = number + 1
            yield {**event, "sequence_number": number}

    def _begin_events(self) -> Iterator[dict[str, Any]]:
        unknown: dict[str, Any] = {"incomplete_details": None, "output": [], "usage": None}
        response = {**self._head, "status": "in_progress", **unknown}
        yield {"type": "response.created", "response": response}
        yield {"type": "response.in_progress", "response": response}

    def _end_events(self, _choice: Choice) -> Iterator[dict[str, Any]]:
        response = {**self._head, **self._body(), "usage": self.reported_usage()}
        yield {"type": f"response.{response['status']}", "response": response}

    def _status(self) -> dict[str, Any]:
        (choice,) = self._choices.values()
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = reasons.get(choice.finish or "")
        details = {"reason": reason} if reason else None
        return {"status": "incomplete" if reason else "completed", "incomplete_details": details}

    def _item(self, block: Block, *, is_whole: bool = True) -> dict[str, Any]:
        """An output item, or the incomplete one that begins it in a stream."""
        name = f"{self._number}_{block.index}"
        status = "in_progress" if not is_whole else "incomplete" if block.is_cut else "completed"
        if block.kind == CALL:
            call = {"id": f"fc_{name}", "type": "function_call", "status": status, "call_id": block.call_id}
            return {**call, "name": block.name, "arguments": block.text if is_whole else ""}
        content = [_part(block, is_whole=True)] if is_whole else []
        if block.kind == THOUGHTS:
            return {
                "id": f"rs_{name}",
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        item = {"id": f"msg_{name}", "type": "message", "role": "assistant"}
        return {**item, "status": status, "content": content}

    def _block_events(self, what: str, block: Block, text: str) -> Iterator[dict[str, Any]]:
        item = self._item(block, is_whole=what == "end")
        of_item = {"output_index": block.index, "item_id": item["id"]}
        of_part = of_item if block.kind == CALL else {**of_item, "content_index": 0}
        if what == "delta":
            logprobs: dict[str, Any] = {"logprobs": []} if block.kind == TEXT else {}
            yield {"type": f"{_EVENTS[block.kind]}.delta", **of_part, "delta": text, **logprobs}
        elif what == "begin":
            yield {"type": "response.output_item.added", "output_index": block.index, "item": item}
            if block.kind != CALL:
                part = _part(block, is_whole=False)
                yield {"type": "response.content_part.added", **of_part, "part": part}
        else:
            if block.kind == CALL:
                done: dict[str, Any] = {"arguments": block.text, "name": block.name}
            else:
                done = {"text": block.text, **({"logprobs": []} if block.kind == TEXT else {})}
            yield {"type": f"{_EVENTS[block.kind]}.done", **of_part, **done}
            if block.kind != CALL:
                yield {"type": "response.content_part.done", **of_part, "part": _part(block, is_whole=True)}
            yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def reported_usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _part(block: Block, *, is_whole: bool) -> dict[str, Any]:
    text = block.text if is_whole else ""
    if block.kind == THOUGHTS:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
