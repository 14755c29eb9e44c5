"""A chat as a prompt: which of the model's chat templates writes it, and from what.

Templates are written for what the transformers library passes on, so they get the same: names and thoughts,
the arguments of tool calls as values, and no content where it is null. Some fail with that, because they
append the arguments to text, or ask whether the content is none: these get other forms.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire.v1 import runner_pb2, types_pb2

from service.errors import InvalidArgument
from service.text.bounded_json import openai_messages, parse, tools_of, variables_of
from service.text.chat_template import DEFAULT, ChatTemplates, TemplateError, TemplateRaised

# The template for chats with tools, where a model has several.
_WITH_TOOLS = "tool_use"
# The most characters of a function's name. Its results repeat it, maybe thousands of times.
_MAX_NAME_CHARACTERS = 256
# What a template gets for a content of null, and for the arguments of calls: the most usual form first.
_ABSENT = object()
_CONTENTS = (_ABSENT, None, "")
_ARGUMENTS_ARE_VALUES = (True, False)
# Behind the content of a message that is continued: where that ends in what the template writes.
_CONTENT_END = "CONTINUE_LAST_MESSAGE_HERE"
# In the template of gpt-oss.
_HARMONY = "<|channel|>analysis"
_Messages = Sequence[Mapping[str, Any]]


async def prompt_of(
    templates: ChatTemplates, template: types_pb2.ChatTemplate, chat: runner_pb2.Chat, tenant: str = ""
) -> str:
    """The prompt of a chat of a tenant that has passed `check_chat`. Raises InvalidArgument, Draining."""
    # Templates ask whether there are tools: an empty list is none.
    tools = tools_of(chat) or None
    further = variables_of(chat)
    is_whole = chat.continue_last_message or chat.omit_generation_prompt
    render = functools.partial(
        templates.render, template, further=further, add_generation_prompt=not is_whole, tenant=tenant
    )
    name = chat.template or (_WITH_TOOLS if tools and _WITH_TOOLS in template.sources else DEFAULT)
    first_error: TemplateError | None = None
    is_harmony = _HARMONY in template.sources.get(name, "")
    if is_harmony and tools:
        tools = _described(tools)
    for messages in map(_with_single_calls, _forms(chat)) if is_harmony else _forms(chat):
        try:
            text = await render(messages, name=name, tools=tools)
            break
        except TemplateError as error:
            first_error = first_error or error
            if not isinstance(error, TemplateRaised):
                raise _bad_chat(first_error) from None
    else:
        assert first_error is not None
        raise _bad_chat(first_error)
    if tools:
        # A template that fails without tools uses them.
        with contextlib.suppress(TemplateError):
            if text == await render(messages, name=name):
                message = "the model's chat template does not support tools"
                raise InvalidArgument("BAD_CHAT", "chat.tools_json", message)
    return _up_to_content(text) if chat.continue_last_message else text


def _up_to_content(text: str) -> str:
    """A prompt without what the template writes after the content of the last message."""
    end = text.rfind(_CONTENT_END)
    if end < 0:
        message = "the chat template does not write the content of the last message"
        raise InvalidArgument("BAD_CHAT", "chat.continue_last_message", message)
    return text[:end]


def _forms(chat: runner_pb2.Chat) -> Iterator[_Messages]:
    """The messages in each form that templates may expect. Raises InvalidArgument."""
    called = [message for message in chat.messages if message.tool_calls]
    has_null = any(not message.HasField("content") for message in called)
    forms = itertools.product(
        _CONTENTS if has_null else _CONTENTS[:1], _ARGUMENTS_ARE_VALUES if called else (True,)
    )
    for null, are_values in forms:
        yield _messages(chat, null, are_values=are_values)


def _messages(chat: runner_pb2.Chat, null: object, *, are_values: bool) -> _Messages:
    # The function of each call before a message, by the call's id.
    functions: dict[str, str] = {}
    written = openai_messages(chat, _value if are_values else lambda given, _field: given)
    for message, fields in zip(chat.messages, written, strict=True):
        if message.HasField("reasoning_content"):
            # Templates have three names for it.
            names = ("reasoning_content", "thinking", "reasoning")
            fields.update(dict.fromkeys(names, message.reasoning_content))
        if message.tool_calls and not message.HasField("content"):
            fields["content"] = null
            if null is _ABSENT:
                del fields["content"]
        for call in message.tool_calls:
            functions[call.id] = call.name
        if message.tool_call_id and not message.name:
            name = functions.get(message.tool_call_id, "")
            if 0 < len(name) <= _MAX_NAME_CHARACTERS:
                fields["name"] = name
    if chat.continue_last_message:
        content = chat.messages[-1].content.rstrip()
        if not content:
            text = "the content of the last message is empty"
            raise InvalidArgument("BAD_CHAT", "chat.continue_last_message", text)
        written[-1]["content"] = content + _CONTENT_END
    return written


def _with_single_calls(messages: _Messages) -> _Messages:
    """Each call in a message of its own, before its result, and with one text beside it.

    The template of gpt-oss leaves further calls out, and fails where there are thoughts beside a content.
    """
    made: list[Mapping[str, Any]] = []
    # Calls without results so far, by id.
    unanswered: dict[str, deque[Mapping[str, Any]]] = {}
    for message in messages:
        if message["role"] != "tool":
            made += itertools.chain(*unanswered.values())
            unanswered = {}
        elif of_id := unanswered.get(message.get("tool_call_id", "")):
            made.append(of_id.popleft())
        calls = message.get("tool_calls", ())
        for number, call in enumerate(calls):
            texts = [message.get("thinking"), message.get("content")] if not number else []
            text = "\n".join(filter(None, texts))
            own = {"role": message["role"], "content": text, "tool_calls": [call]}
            unanswered.setdefault(call["id"], deque()).append(own)
        if not calls:
            made.append(message)
    return [*made, *itertools.chain(*unanswered.values())]


def _described(tools: Sequence[Any]) -> list[Any]:
    """Functions with a description, without which the template of gpt-oss fails."""
    return [
        {**tool, "function": {"description": "", **tool["function"]}}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]


def _value(arguments_json: str, field: str) -> Any:
    return parse(arguments_json, "BAD_CHAT", field)


def _bad_chat(error: TemplateError) -> InvalidArgument:
    return InvalidArgument("BAD_CHAT", "chat", str(error))
