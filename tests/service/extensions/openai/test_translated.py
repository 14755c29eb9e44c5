"""/v1/responses and /v1/messages: the same execution in other forms, in one piece and as a stream."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.openai.anthropic_messages import messages
from service.extensions.openai.choices import Blocks
from service.extensions.openai.requests import ResolveModel
from service.extensions.openai.responses import json_pieces
from service.extensions.openai.responses_api import ResponsesRequest
from service.extensions.openai.responses_api import responses as kept_responses
from service.extensions.openai.stored_responses import StoredResponses
from service.runtimes.base import Batch, ChunkSink
from service.text.bounded_json import MAX_BYTES
from service.text.output_parser import Part
from tests.service.extensions.openai.served_front import FakeRuntime, chunk, serving
from tests.service.extensions.openai.test_requests import resolve
from tests.service.extensions.openai.test_tools import CALLS, WEATHER, answering

OF_RESPONSES: Any = [{"type": "function", **WEATHER}]
OF_MESSAGES: Any = [{"name": "weather", "input_schema": WEATHER["parameters"]}]
WRITTEN = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALLS}"
IMAGE: Any = [{"role": "user", "content": [{"type": "image"}]}]
TALK: Any = [{"role": "user", "content": "Go."}]


def responses(value: object, resolve: ResolveModel) -> ResponsesRequest:
    """Where nothing was kept before."""
    return kept_responses(value, resolve, StoredResponses())


async def test_responses() -> None:
    async with answering(WRITTEN) as (client, runtime):
        asked: Any = {"model": "local", "input": "Go.", "instructions": "Be kind.", "tools": OF_RESPONSES}
        whole = await client.responses.create(**asked)
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in whole.output] == kinds
        assert (whole.output_text, whole.status) == ("Let me see.", "completed")
        assert whole.output[0].content[0].text == "Hm."
        assert json.loads(whole.output[3].arguments) == {"city": "Bern"}
        assert whole.usage.input_tokens == len(runtime.prompt)
        assert whole.usage.output_tokens_details.reasoning_tokens
        assert "|system:Be kind.|user:Go." in runtime.prompt
        # The SDK checks the order of the events, and puts the response together.
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert streamed.output_text == whole.output_text and streamed.usage == whole.usage
        assert [item.type for item in streamed.output] == kinds
        for made, expected in zip(streamed.output[2:], whole.output[2:], strict=True):
            assert made.arguments == expected.arguments
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert "".join(event.delta for event in deltas) == "Let me see."


async def test_a_response_goes_on_from_one_that_is_kept() -> None:
    async with answering([WRITTEN, "Sun."]) as (client, runtime):
        asked: Any = {"model": "local", "instructions": "Be kind.", "tools": OF_RESPONSES}
        # The ids of items are nobody's business.
        told: Any = [{"role": "user", "content": "Go.", "id": {"nested": [[]]}}]
        async with client.responses.stream(**asked, input=told) as stream:
            first = await stream.get_final_response()
        again = await client.responses.retrieve(first.id)
        assert [item.id for item in again.output] == [item.id for item in first.output]
        assert (again.output_text, again.usage) == (first.output_text, first.usage)
        # Before, the client read an empty stream.
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            await client.responses.retrieve(first.id, stream=True)
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "21"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await client.responses.create(
            model="local", input=outputs, previous_response_id=first.id, store=False
        )
        # Instructions are those of each request.
        before = "|user:Go.|assistant:Let me see."
        assert second.previous_response_id == first.id and "Be kind." not in runtime.prompt
        assert before in runtime.prompt and runtime.prompt.count("|tool:21") == 2
        for unknown in (second.id, "resp_1"):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="local", input="Go.", previous_response_id=unknown)
            assert caught.value.code == "previous_response_not_found"
            assert caught.value.param == "previous_response_id"
        await client.responses.delete(first.id)
        for gone in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError) as missing:
                await gone(first.id)
            assert missing.value.code == "response_not_found"


@pytest.mark.parametrize("previous", [True, False], ids=["kept", "sent back"])
async def test_a_response_goes_on_from_one_whose_call_is_cut_off(previous: bool) -> None:
    """A stream has sent the beginning of the call, whose arguments are no JSON. Its item is incomplete."""
    async with answering(["Hm. " + CALLS[:56], "Sun."]) as (client, runtime):
        async with client.responses.stream(model="local", input="Go.", tools=OF_RESPONSES) as stream:
            first = await stream.get_final_response()
        assert [item.status for item in first.output] == ["completed", "incomplete"]
        assert first.output[1].arguments == '{"city": "B'
        going_on: Any = {"input": "And?", "previous_response_id": first.id}
        if not previous:
            items = [item.to_dict() for item in first.output]
            going_on = {"input": [*items, {"role": "user", "content": "And?"}]}
        second = await client.responses.create(model="local", **going_on)
        assert second.output_text == "Sun." and 'Hm.{"city": "B|user:And?' in runtime.prompt


async def test_what_the_end_cuts_off_is_incomplete() -> None:
    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        sink.put([chunk(reasoning_content="Hm.")])
        sink.put([chunk("On", finish_reason=runner_pb2.FINISH_REASON_LENGTH)])

    async with serving(FakeRuntime(generate)) as server, server.client() as client:
        whole = await client.responses.create(model="m", input="Go.")
        stream = await client.responses.create(model="m", input="Go.", stream=True)
        events = [event async for event in stream]
        for answer in (whole, events[-1].response):
            assert answer.status == "incomplete"
            assert [item.status for item in answer.output] == ["completed", "incomplete"]


async def posted(client: Any, asked: Any, path: str = "messages") -> Any:
    """The response to what OpenAI's client only sends."""
    return await client._client.post(f"{client.base_url}{path}", json=asked)


async def raw_events(client: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with client._client.stream("POST", f"{client.base_url}{path}", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines()]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events]
    return events


async def test_messages() -> None:
    async with answering(WRITTEN) as (client, runtime):
        asked: Any = {"model": "local", "max_tokens": 99, "messages": TALK, "system": "Be kind."}
        asked["tools"] = OF_MESSAGES
        whole = (await posted(client, asked)).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
        assert whole["content"][0]["thinking"] == "Hm." and whole["content"][1]["text"] == "Let me see."
        assert whole["content"][2]["input"] == {"city": "Bern"}
        assert (whole["stop_reason"], whole["usage"]["input_tokens"]) == ("tool_use", len(runtime.prompt))
        assert "|system:Be kind.|user:Go." in runtime.prompt
        events = await raw_events(client, "messages", {**asked, "stream": True})
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "text": ""})
            elif event["type"] == "content_block_delta":
                assert event["index"] == len(blocks) - 1
                (text,) = (value for name, value in event["delta"].items() if name != "type")
                blocks[-1]["text"] += text
        assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]
        assert [block["text"] for block in blocks[:2]] == ["Hm.", "Let me see."]
        assert json.loads(blocks[3]["text"]) == {"city": "Bern"}
        assert events[0]["message"]["usage"]["input_tokens"] > 0
        assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-1] == {"type": "message_stop"}
        count = await posted(client, {**asked, "max_tokens": None}, "messages/count_tokens")
        assert count.json() == {"input_tokens": events[0]["message"]["usage"]["input_tokens"]}
        refused = await posted(client, {**asked, "speed": "fast"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_tokens_and_back() -> None:
    async with answering("") as (client, _):
        root = str(client.base_url).removesuffix("v1/")

        async def post(path: str, **body: Any) -> Any:
            return (await client._client.post(f"{root}{path}", json=body)).json()

        found = await post("tokenize", prompt="ab", return_token_strs=True)
        assert found.keys() == {"count", "max_model_len", "tokens", "token_strs"}
        assert (found["count"], found["token_strs"]) == (2, ["a", "b"])
        found = await post(
            "tokenize", model="local", messages=TALK, chat_template_kwargs={"enable_thinking": True}
        )
        assert await post("detokenize", tokens=found["tokens"]) == {"prompt": "|user:Go.|<think>\n"}
        refused = await post("detokenize", tokens=[-1])
        assert refused["error"]["param"] == "tokens[0]"
        large = {"x": "x" * MAX_BYTES}
        refused = await post("tokenize", messages=TALK, chat_template_kwargs=large)
        assert refused["error"]["param"] == "chat_template_kwargs"


def test_conversations_are_those_of_chats() -> None:
    """Calls and their results, thoughts, and texts in parts."""
    call = runner_pb2.ToolCall(id="c1", name="weather", arguments_json='{"city": "Bern"}')
    roles = (runner_pb2.CHAT_ROLE_USER, runner_pb2.CHAT_ROLE_ASSISTANT, runner_pb2.CHAT_ROLE_TOOL)
    expected = [
        runner_pb2.ChatMessage(role=roles[0], content="Go.\nNow."),
        runner_pb2.ChatMessage(role=roles[1], content="Yes.", reasoning_content="Hm.", tool_calls=[call]),
        runner_pb2.ChatMessage(role=roles[2], tool_call_id="c1", content="Sun."),
        runner_pb2.ChatMessage(role=roles[0], content="And?"),
    ]
    of_messages = [
        {"role": "user", "content": [{"type": "text", "text": each} for each in ("Go.", "Now.")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Yes.", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Sun."}]},
                {"type": "text", "text": "And?"},
            ],
        },
    ]  # fmt: skip
    of_responses = [
        {"role": "user", "content": [{"type": "input_text", "text": each} for each in ("Go.", "Now.")]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "status": "completed", "id": "m",
         "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "Sun."},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    made = messages({"model": "m", "max_tokens": 9, "messages": of_messages}, resolve)
    assert list(made.items[0].chat.messages) == expected
    # Turns of one role are one.
    turns: list[Any] = of_messages
    apart = [{**each, "content": [block]} for each in turns for block in each["content"]]
    made = messages({"model": "m", "max_tokens": 9, "messages": apart}, resolve)
    assert list(made.items[0].chat.messages) == expected
    made = responses({"model": "m", "input": of_responses}, resolve)
    assert list(made.items[0].chat.messages) == expected


async def test_an_error_of_a_message_names_its_item() -> None:
    """It is found when the template is filled in, and counts messages: instructions are one, too."""
    items: Any = [
        {"role": "user", "content": "Go."},
        {"type": "message", "role": "assistant", "content": "Yes."},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{"},
        {"type": "function_call_output", "call_id": "c1", "output": "Sun."},
    ]
    async with answering("") as (client, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="local", input=items, instructions="Be kind.")
        assert caught.value.param == "input[3].arguments" and "input[3].arguments" in caught.value.message


async def test_answers_of_a_schema_over_messages() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    made = messages({"model": "m", "max_tokens": 9, "messages": TALK, "output_config": config}, resolve)
    item = made.items[0]
    assert json.loads(item.constraint.json_schema) == schema
    assert json.loads(item.chat.variables_json) == {"reasoning_effort": "low"}
    async with answering("") as (client, _):
        asked = {"model": "local", "max_tokens": 9, "messages": TALK, "stop_sequences": [""]}
        refused = (await posted(client, asked)).json()
        # Anthropic's errors have no other place for it.
        assert "stop_sequences[0]" in refused["error"]["message"]


async def test_an_answer_goes_on_from_the_assistants_last_message() -> None:
    """Called prefill: Anthropic's API has no field for it."""
    begun = [*TALK, {"role": "assistant", "content": "It is ("}]
    # Caches are not asked for here.
    tools = [{**OF_MESSAGES[0], "eager_input_streaming": True}]
    more = {"cache_control": {"type": "ephemeral"}, "tools": tools}
    async with answering("A)") as (client, runtime):
        asked = {"model": "local", "max_tokens": 9, "messages": begun, **more}
        whole = (await posted(client, asked)).json()
        assert whole["content"] == [{"type": "text", "text": "A)"}]
        assert runtime.prompt.endswith("|user:Go.|assistant:It is (")


@pytest.mark.parametrize(
    ("parse", "body", "field"),
    [
        (messages, {"messages": TALK}, "max_tokens"),
        (messages, {"messages": IMAGE}, "messages[0].content[0].type"),
        (messages, {"messages": TALK, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        (messages, {"messages": TALK, "stop_sequences": 3}, "stop_sequences"),
        (messages, {"messages": TALK, "tools": 5}, "tools"),
        (messages, {"messages": TALK, "tool_choice": {"type": []}}, "tool_choice.type"),
        (messages, {"messages": TALK, "system": [{"type": {}}]}, "system[0].type"),
        (responses, {"input": "x", "tools": True}, "tools"),
        (responses, {"input": [{"role": "user", "content": [{"type": [], "text": "x"}]}]},
         "input[0].content[0].type"),
        (responses, {"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        (responses, {"input": "x", "background": True}, "background"),
        (responses, {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (responses, {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        (responses, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (responses, {}, "input"),
        (responses, {"input": [*TALK, {"role": "x", "content": "x"}], "instructions": ""}, "input[1].role"),
        (responses, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        (responses, {"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (messages, {"messages": TALK, "tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema"),
        (messages, {"messages": TALK, "output_config": {"format": {}}}, "output_config.format.type"),
        (messages, {"messages": TALK, "output_config": {"format": {"type": "json_schema"}}},
         "output_config.format.schema"),
        (messages, {"messages": TALK, "output_config": {"effort": 1}}, "output_config.effort"),
    ],
)  # fmt: skip
def test_what_is_refused(parse: Any, body: dict[str, Any], field: str) -> None:
    more = {"max_tokens": 9} if parse is messages and field != "max_tokens" else {}
    with pytest.raises(InvalidArgument) as caught:
        parse({"model": "m", **body, **more}, resolve)
    assert caught.value.field == field
    # What a chat calls it, is not said.
    assert "max_completion_tokens" not in caught.value.message


def test_arguments_of_several_calls_in_turns() -> None:
    """As a provider may send them."""
    blocks = Blocks()
    parts = [
        Part(begun=("a", "f"), index=0),
        Part(begun=("b", "g"), index=1),
        Part(arguments='{"of": "f"}', index=0),
        Part(arguments='{"of": "g"', index=1),
    ]
    blocks.add(parts)
    assert [(block.name, block.text) for block in blocks.all] == [("f", '{"of": "f"}'), ("g", '{"of": "g"')]


async def test_an_answer_in_one_piece_has_the_items_of_a_stream() -> None:
    """In the order in which they were written. What turns out to be no call is text there."""
    call = runner_pb2.ToolCall(id="c1", name="f", arguments_json="{}")

    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        broken = runner_pb2.ToolCall(id="c2", index=1, name="g", arguments_json='{"of')
        sink.put([chunk("Hm."), chunk(tool_calls=[call]), chunk("So."), chunk(tool_calls=[broken])])
        end: Any = {"malformed_calls": {1: '<call>{"of'}, "finish_reason": runner_pb2.FINISH_REASON_STOP}
        sink.put([chunk(".", **end)])

    async with serving(FakeRuntime(generate)) as server, server.client() as client:
        whole = await client.responses.create(model="m", input="Go.")
        stream = await client.responses.create(model="m", input="Go.", stream=True)
        streamed = [event async for event in stream][-1].response
        kinds = ["message", "function_call", "message"]
        assert [item.type for item in whole.output] == kinds
        assert [item.type for item in streamed.output] == [*kinds, "function_call", "message"]
        assert whole.output_text == 'Hm.So.<call>{"of.' and streamed.output_text == "Hm.So.."


async def test_text_of_a_malformed_call_is_where_the_call_was() -> None:
    """Also if a call follows. Each item has an id of its own."""
    broken = runner_pb2.ToolCall(id="c1", name="f", arguments_json='{"of')
    call = runner_pb2.ToolCall(id="c2", index=1, name="g", arguments_json="{}")

    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        sink.put([chunk("Hm."), chunk(tool_calls=[broken]), chunk(tool_calls=[call])])
        end: Any = {"malformed_calls": {0: '<call>{"of'}, "finish_reason": runner_pb2.FINISH_REASON_STOP}
        sink.put([chunk("So.", **end)])

    async with serving(FakeRuntime(generate)) as server, server.client() as client:
        whole = await client.responses.create(model="m", input="Go.")
        chat = await client.chat.completions.create(model="m", messages=TALK)
    assert [item.type for item in whole.output] == ["message", "function_call", "message"]
    assert [item.id.rpartition("_")[2] for item in whole.output] == ["0", "1", "2"]
    assert [item.content[0].text for item in whole.output[::2]] == ['Hm.<call>{"of', "So."]
    assert chat.choices[0].message.content == 'Hm.<call>{"ofSo.'


@pytest.mark.parametrize(
    ("arguments", "status"), [('{"a": 1}', "completed"), ('{"a": 1', "incomplete"), ("", "incomplete")]
)
async def test_a_call_is_incomplete_if_its_arguments_are(arguments: str, status: str) -> None:
    """The end may come behind a call: then it can be made."""
    call = runner_pb2.ToolCall(id="c1", name="f", arguments_json=arguments)

    async def generate(_batch: Batch, sink: ChunkSink) -> None:
        sink.put([chunk(tool_calls=[call])])
        sink.put([chunk(finish_reason=runner_pb2.FINISH_REASON_LENGTH)])

    async with serving(FakeRuntime(generate)) as server, server.client() as client:
        whole = await client.responses.create(model="m", input="Go.")
        stream = await client.responses.create(model="m", input="Go.", stream=True)
        events = [event async for event in stream]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    for items in (whole.output, events[-1].response.output, done):
        assert [item.status for item in items] == [status]
    assert whole.status == events[-1].response.status == "incomplete"


def test_names_of_fields_are_escaped() -> None:
    value = {'a"b': {"\n": [1]}, "metadata": {}}
    assert json.loads("".join(json_pieces(value))) == value
