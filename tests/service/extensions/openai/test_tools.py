"""Tool calls and thoughts over HTTP, of a runtime that writes what it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from quire.v1 import runner_pb2, types_pb2

from service.errors import QuireError
from service.runtimes.base import Batch, ChunkSink
from service.runtimes.items import failures
from service.runtimes.preparing import ItemPreparer
from tests.chat_templates import byte_tokenizer
from tests.service.extensions.openai.served_front import FakeRuntime, serving

# In the style of Qwen: calls as Hermes writes them, and thoughts that the prompt may begin.
TEMPLATE = (
    "{% if tools %}Call as <tool_call>{'name': ..., \"arguments\": ...}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}|{{ message.role }}:{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}|{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}},
        "required": ["city"],
        "$defs": {"City": {"enum": ["Bern", "Rome"]}},
    },
}
TOOLS: Any = [{"type": "function", "function": each} for each in (WEATHER, {"name": "stop"})]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
ASKED: Any = {"model": "local", "messages": [{"role": "user", "content": "Go."}]}
CALLS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n' * 2


class Writer(FakeRuntime):
    """This server's own runtime, whose model writes a text, a token for each byte; keeps its prompt.

    Of several texts, one for each request.
    """

    def __init__(self, text: str | list[str]) -> None:
        super().__init__(self._write, "local")
        self.text = text
        self.tokenizer = byte_tokenizer()
        self.preparer: ItemPreparer
        self.prompt = ""

    async def _write(self, batch: Batch, sink: ChunkSink) -> None:
        text = self.text if isinstance(self.text, str) else self.text.pop(0)
        asked = runner_pb2.ExecuteItem()
        asked.CopyFrom(batch.items[0])
        # Clients count on tokens of several bytes.
        asked.max_tokens = 0
        try:
            item = await self.preparer.prepare(asked, None)
        except QuireError as error:
            sink.put(failures(batch.items[0], error))
            return
        self.prompt = self.tokenizer.decode(list(item.spec.prompt), skip_special_tokens=False)
        sample = item.sample(0)
        for token in self.tokenizer.encode(text).ids:
            sink.put([sample.take(token)])
        sink.put([sample.complete()])


@asynccontextmanager
async def answering(
    text: str | list[str], template: str = TEMPLATE, special: Sequence[str] = (), **settings: Any
) -> AsyncIterator[tuple[Any, Writer]]:
    """A client of a server whose model writes a text. `special`: special tokens of its tokenizer."""
    runtime = Writer(text)
    runtime.tokenizer.add_special_tokens(list(special))
    texts = {
        "model": types_pb2.ModelDescription(vocab_size=512, max_seq_len=1 << 20),
        "executor": types_pb2.ExecutorCapabilities(kv_capacity_tokens=1 << 20),
        "tokenizer_json": runtime.tokenizer.to_str().encode(),
        "chat_template": types_pb2.ChatTemplate(sources={"default": template}),
    }
    async with serving(runtime, texts=texts, **settings) as served, served.client() as client:
        runtime.preparer = ItemPreparer(served.state, served.text)
        yield client, runtime


async def both(client: Any, **settings: Any) -> dict[str, Any]:
    """The message and the reason of its end, which are the same in one piece and as a stream."""
    whole = await client.chat.completions.create(**ASKED, **settings)
    message, finish = whole.choices[0].message, whole.choices[0].finish_reason
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    found = {"content": message.content, "calls": calls, "finish": finish}
    found["thoughts"] = getattr(message, "reasoning_content", None)
    content = thoughts = ""
    parts: dict[int, list[Any]] = {}
    async for event in await client.chat.completions.create(**ASKED, **settings, stream=True):
        (choice,) = event.choices
        content += choice.delta.content or ""
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        for part in choice.delta.tool_calls or []:
            call = parts.setdefault(part.index, [part.id, part.function.name, ""])
            call[2] += part.function.arguments
        finish = choice.finish_reason
    assert all(call[0].startswith("call_") for call in parts.values())
    streamed = {"content": content or None, "calls": [tuple(call[1:]) for call in parts.values()]}
    assert found == {**streamed, "finish": finish, "thoughts": thoughts or None}
    return found


async def test_what_a_model_writes_is_divided() -> None:
    async with answering(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALLS}") as (client, runtime):
        found = await both(client, tools=TOOLS)
        calls = [("weather", '{"city": "Bern"}')] * 2
        assert found == {"content": "Let me see.", "calls": calls, "finish": "tool_calls", "thoughts": "Hm."}
        assert '"name": "weather"' in runtime.prompt
        answer = await client.chat.completions.create(**ASKED, tools=TOOLS)
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(">\nHm.\n</think>")
        found = await both(client, tools=TOOLS, parallel_tool_calls=False)
        assert found["calls"] == calls[:1]
        # Without tools there are no calls.
        for settings in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            found = await both(client, **settings, extra_body={"include_reasoning": False})
            text = f"Let me see.\n{CALLS}"
            assert found == {"content": text, "calls": [], "finish": "stop", "thoughts": None}
            assert "weather" not in runtime.prompt


async def test_thoughts_that_the_prompt_begins() -> None:
    thinking = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    async with answering("So.\n</think>\n\nYes.") as (client, runtime):
        found = await both(client, **thinking)
        assert (found["thoughts"], found["content"]) == ("So.", "Yes.")
        assert runtime.prompt.endswith("|<think>\n")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    async with answering("{}") as (client, runtime):
        found = await both(client, response_format=schema, **thinking)
        assert (found["thoughts"], found["content"]) == (None, "{}")
        assert runtime.prompt.endswith("|<think>\n</think>\n\n"), "a grammar allows no thoughts"


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {**NAMED, "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.type"),
        ({"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": [{**NAMED, "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ],
)  # fmt: skip
async def test_bad_choices(settings: dict[str, Any], param: str) -> None:
    async with answering("") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASKED, **settings)
        assert caught.value.param == param


async def test_formats_can_be_set() -> None:
    settings = {"tool_call_parser": "pythonic", "reasoning_parser": "none"}
    async with answering(
        '[weather(city="Rome")]', "{{ messages | tojson }}{{ tools | tojson }}", **settings
    ) as (client, _):
        found = await both(client, tools=TOOLS)
        assert found["calls"] == [("weather", '{"city": "Rome"}')]


async def test_markers_that_are_special_tokens_are_asked_for() -> None:
    async with answering(f"<|pad|>Hi.{CALLS}", special=["<tool_call>", "<|pad|>"]) as (client, _):
        found = await both(client, tools=TOOLS)
        assert (found["content"], len(found["calls"])) == ("Hi.", 2), "others are no part of the text"
        found = await both(client, tools=TOOLS, extra_body={"skip_special_tokens": False})
        assert found["content"] == "<|pad|>Hi."
