"""Conversations with tools, names and thoughts are written as by the transformers library."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage
from quire import item
from quire.v1 import runner_pb2, types_pb2
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from service.errors import InvalidArgument
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.requests import chat
from service.text.chat_template import ChatTemplates, TemplateRaised
from service.text.chats import prompt_of
from service.text.template_process import render
from tests import chat_templates
from tests import conversations as in_use
from tests.chat_templates import byte_tokenizer
from tests.conversations import DEEPSEEK

TEMPLATES = chat_templates.TEMPLATES | in_use.TEMPLATES
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ORACLE = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), **SPECIAL)  # type: ignore[no-untyped-call]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
PLENTY = 1 << 20
# How a template fails with variables of another form.
FAILURES = (jinja2.TemplateError, TypeError, AttributeError)
_MODEL = ResolvedModel("local", is_local=True, sampling_defaults=types_pb2.SamplingParams())
_Messages = Sequence[Mapping[str, Any]]
# The library drops a content that is null.
_DROPPED = object()


class InProcess(ChatTemplates):
    """Renders without a process of its own, for many examples."""

    async def render(
        self,
        template: types_pb2.ChatTemplate,
        messages: _Messages,
        *,
        name: str = "default",
        tools: Sequence[Any] | None = None,
        further: Mapping[str, Any] = MappingProxyType({}),
        add_generation_prompt: bool = True,
        tenant: str = "",
    ) -> str:
        variables = {**further, "messages": messages, "tools": tools, "documents": None}
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return render(template.sources[name], {**template.special_tokens, **variables}, PLENTY)
        except FAILURES as error:
            raise TemplateRaised(str(error)) from None


def parsed(messages: _Messages, **settings: Any) -> runner_pb2.Chat:
    """The chat of a request over HTTP."""
    body = json.loads(json.dumps({"model": "m", "messages": messages, **settings}))
    return chat(body, lambda _: _MODEL).items[0].chat


def written(made: runner_pb2.Chat, sources: Mapping[str, str] | str) -> str:
    sources = {"default": sources} if isinstance(sources, str) else sources
    template = types_pb2.ChatTemplate(sources=sources, special_tokens=SPECIAL)
    return asyncio.run(prompt_of(InProcess(), template, made))


def expected(source: str, messages: _Messages, tools: Any = None) -> str | None:
    """What the transformers library writes; None: it fails, whatever the form of tool calls."""
    for null, are_values in itertools.product((_DROPPED, None, ""), (True, False)):
        given = _in_form(messages, null, are_values=are_values)
        with contextlib.suppress(*FAILURES):
            if null is _DROPPED:
                return ORACLE.apply_chat_template(  # type: ignore[return-value]
                    given, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
                )
            # Below the part that drops what is null.
            rendered: Any = render_jinja_template(
                [given],
                tools=tools,
                chat_template=source,
                add_generation_prompt=True,
                **SPECIAL,  # type: ignore[arg-type]
            )
            return str(rendered[0][0])
    return None


def _in_form(messages: _Messages, null: Any, *, are_values: bool) -> list[dict[str, Any]]:
    given: list[dict[str, Any]] = copy.deepcopy(list(messages))  # type: ignore[arg-type]
    names: dict[str, str] = {}
    for message in given:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            names[call["id"]] = function["name"]
            text = "{}" if function["arguments"] in ("", "null") else function["arguments"]
            function["arguments"] = json.loads(text) if are_values else text
            if message.get("content") is None:
                message["content"] = None if null is _DROPPED else null
        if "reasoning_content" in message:
            # The library adds the other name.
            message["reasoning"] = message["reasoning_content"]
        if message["role"] == "tool" and message["tool_call_id"] in names:
            message.setdefault("name", names[message["tool_call_id"]])
    return given


def call(arguments: str = '{"a": 1, "b": [2]}', call_id: str = "call-0001") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


TEXTS = st.text(max_size=30) | st.sampled_from(
    ["", "  <b>&'\"  2 < 3\n", "<think>\nso\n</think>\n\nyes", "{{ bos_token }}{% raw %}", "\u00e9"]
)
NAMES = st.none() | st.sampled_from(["ann", "bob"])
IDS = st.sampled_from(["abcdefghi", "call-0001", "x"])
ARGUMENTS = st.sampled_from(["", "null", "{}", '{"a":1}', '{"b": [true, null], "a": "\\u00e9"}'])


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """With any roles, or users and assistants in turns, as some templates require."""
    messages: list[dict[str, Any]] = []
    any_roles = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=6)
    in_turns = st.integers(0, 3).map(lambda turns: ["user", "assistant"] * turns + ["user"])
    for role in draw(any_roles | in_turns | in_turns.map(lambda roles: ["system", *roles])):
        message: dict[str, Any] = {"role": role, "content": draw(TEXTS)}
        if role == "tool":
            message["tool_call_id"] = draw(IDS)
        if role == "assistant" and draw(st.booleans()):
            message["tool_calls"] = [
                call(draw(ARGUMENTS), each) for each in draw(st.lists(IDS, min_size=1, max_size=2))
            ]
            content = draw(st.sampled_from(["null", "absent", "text"]))
            if content == "null":
                message["content"] = None
            elif content == "absent":
                del message["content"]
        if role == "assistant" and draw(st.booleans()):
            message["reasoning_content"] = draw(TEXTS)
        if name := draw(NAMES):
            message["name"] = name
        messages.append(message)
    return messages


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
@settings(max_examples=settings().max_examples // 2)
def test_a_conversation_is_written_as_by_transformers(name: str, messages: list[dict[str, Any]]) -> None:
    text = expected(TEMPLATES[name], messages)
    made = [parsed(messages), item(messages).chat]
    for each in made:
        if text is None:
            with pytest.raises(InvalidArgument):
                written(each, TEMPLATES[name])
        else:
            assert written(each, TEMPLATES[name]) == text


FINISHED: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [call(call_id="abcdefghi")]},
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
    {"role": "user", "content": "and 4?"},
]


def test_the_error_of_a_template_that_fails_with_both_forms_is_the_first() -> None:
    is_value = "messages[1].tool_calls[0].function.arguments is mapping"
    source = f"{{{{ raise_exception('first' if {is_value} else 'second') }}}}"
    with pytest.raises(InvalidArgument, match="first"):
        written(parsed(FINISHED), source)


async def test_the_other_form_is_tried_in_the_process_too() -> None:
    template = types_pb2.ChatTemplate(sources={"default": DEEPSEEK}, special_tokens=SPECIAL)
    with contextlib.closing(ChatTemplates()) as templates:
        text = await prompt_of(templates, template, parsed(FINISHED))
    assert text == expected(DEEPSEEK, FINISHED)
    assert '{"a": 1, "b": [2]}' in text


def test_an_answer_as_a_client_sends_it_back() -> None:
    """All fields of OpenAI's type, most of them null; and those of streams, parsers and reasoning models."""
    function = {"name": "add", "arguments": "{}", "parsed_arguments": {}}
    made = ChatCompletionMessage.model_validate(
        {
            "role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
            "function_call": None, "parsed": None, "reasoning_content": "hm",
            "tool_calls": [{"id": "abcdefghi", "type": "function", "index": 0, "function": function}],
        }
    )  # fmt: skip
    messages = [FINISHED[0], made.model_dump(), *FINISHED[2:]]
    plain = [FINISHED[0], {"role": "assistant", "content": None, "reasoning_content": "hm",
                           "tool_calls": [call("{}", "abcdefghi")]}, *FINISHED[2:]]  # fmt: skip
    assert parsed(messages) == parsed(plain)
    calls: list[object] | None
    for calls in ([], None):
        answer = ChatCompletionMessage(role="assistant", content="3", annotations=[]).model_dump()
        answer |= {"tool_calls": calls, "reasoning": "hm"}
        answer["annotations"] = [{"type": "url_citation"}]
        assert parsed([FINISHED[0], answer, FINISHED[3]]) == parsed(
            [FINISHED[0], {"role": "assistant", "content": "3", "reasoning_content": "hm"}, FINISHED[3]]
        )
    without_calls = ChatCompletionMessage(role="assistant", content="3").model_dump()
    assert (
        item([FINISHED[0], without_calls]).chat
        == item([FINISHED[0], {"role": "assistant", "content": "3"}]).chat
    )


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_templates_find_thoughts_by_each_of_their_names(name: str) -> None:
    made = parsed([FINISHED[0], {"role": "assistant", "content": "3", "reasoning_content": "hm"}])
    assert written(made, f"{{{{ messages[1].{name} }}}}") == "hm"


def test_an_answer_without_text_is_its_refusal_or_its_thoughts() -> None:
    def answer(**fields: Any) -> runner_pb2.ChatMessage:
        made = ChatCompletionMessage.model_validate({"role": "assistant", **fields}).model_dump()
        return parsed([FINISHED[0], made, FINISHED[3]]).messages[1]

    assert answer(content=None, refusal="no").content == "no"
    parts = [{"type": "text", "text": "well,"}, {"type": "refusal", "refusal": "no"}]
    assert parsed([FINISHED[0], {"role": "assistant", "content": parts}]).messages[1].content == "well,\nno"
    with pytest.raises(InvalidArgument, match="must be text"):
        parsed([{"role": "user", "content": parts}])
    assert answer(content=None, reasoning_content="hm") == answer(content="", reasoning_content="hm")
    for bad in (
        {"content": None},
        {"content": "yes", "refusal": "no"},
        {"content": "x", "audio": {"id": "1"}},
    ):
        with pytest.raises(InvalidArgument):
            parsed([FINISHED[0], {"role": "assistant", **bad}])


@pytest.mark.parametrize(
    ("names", "tools", "template", "used"),
    [
        (["default", "tool_use"], TOOLS, "", "tool_use"),
        (["default", "tool_use"], None, "", "default"),
        (["default", "tool_use"], [], "", "default"),
        (["default", "tool_use"], TOOLS, "default", "default"),
        (["default", "tool_use", "rag"], TOOLS, "rag", "rag"),
        (["default"], TOOLS, "", "default"),
        (["tool_use"], TOOLS, "", "tool_use"),
        (["tool_use"], None, "", None),
    ],
)
def test_the_template_for_tools_is_taken_where_there_are_some(
    names: list[str], tools: Any, template: str, used: str | None
) -> None:
    sources = {name: f"{name}{{{{ tools }}}}" for name in names}
    made = parsed(FINISHED)
    made.template = template
    if tools is not None:
        made.tools_json = json.dumps(tools)
    if used is None:
        with pytest.raises(InvalidArgument, match="none for plain chat"):
            asyncio.run(prompt_of(ChatTemplates(), types_pb2.ChatTemplate(sources=sources), made))
    else:
        assert written(made, sources) == f"{used}{tools or None}"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"variables_json": "["}, "chat.variables_json"),
        ({"variables_json": "[]"}, "chat.variables_json"),
        ({"variables_json": '{"messages": []}'}, "chat.variables_json"),
        ({"continue_last_message": True}, "chat.continue_last_message"),
    ],
)
def test_variables_and_ends_that_are_refused(fields: Mapping[str, Any], field: str) -> None:
    made = parsed([{"role": "user", "content": "hi"}])
    made.MergeFrom(runner_pb2.Chat(**fields))
    with pytest.raises(InvalidArgument) as caught:
        written(made, "{{ messages[0].role }}")
    assert caught.value.field == field


@pytest.mark.parametrize("content", ["end", "<", "|", "im_end", " Hello ", "user"])
@pytest.mark.parametrize("written_as", ["message.content", "message.content | trim"])
def test_a_continued_message_ends_with_its_content(content: str, written_as: str) -> None:
    """Whatever of it the template writes behind that, too."""
    body = "<|im_start|>{{ message.role }}\n{{ CONTENT }}<|im_end|>\n"
    form = f"{{% for message in messages %}}{body}{{% endfor %}}"
    made = parsed([{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}])
    made.continue_last_message = True
    begin = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    expected = content.strip() if "trim" in written_as else content.rstrip()
    assert written(made, form.replace("CONTENT", written_as)) == begin + expected


# As that of gpt-oss: it takes one call of a message, no content beside thoughts, and needs descriptions.
HARMONY = """{%- for tool in tools %}{{- '// ' + tool.function.description }}{% endfor %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}
        {%- if message.content %}
            {{- '<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'to=' + call.name + '<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- else %}{{- message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}"""


def test_harmony_has_one_call_in_a_message() -> None:
    calls = [call('{"a": 1}', "c1"), call('{"a": 2}', "c2"), call('{"a": 3}', "c3")]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "Two.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "second", "tool_call_id": "c2"},
        {"role": "tool", "content": "first", "tool_call_id": "c1"},
        {"role": "user", "content": "And?"},
    ]
    text = written(parsed(messages, tools=TOOLS), HARMONY)
    assert text == (
        "// user<|message|>Go.<|end|>"
        'to=add<|message|>{"a": 2}<|call|>tool<|message|>second<|end|>'
        "<|channel|>analysis<|message|>Hm.\nTwo.<|end|>"
        'to=add<|message|>{"a": 1}<|call|>tool<|message|>first<|end|>'
        'to=add<|message|>{"a": 3}<|call|>user<|message|>And?<|end|>'
    )
