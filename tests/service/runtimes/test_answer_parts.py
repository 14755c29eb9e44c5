"""Answers in parts: divided chunks are those of the parser, however they are cut; calls that are forced."""

from __future__ import annotations

import itertools
import json
from array import array
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire import Answer
from quire._chunks import chunk_of
from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.openai.choices import CALL, TEXT, Choice
from service.extensions.openai.choices import THOUGHTS as THINKING
from service.runtimes.answer_parts import ChunkParser, Parsing, encoded_prompt, parsing_of
from service.text.output_formats import OutputFormats, formats_of
from tests.service.extensions.openai.test_tools import WEATHER
from tests.service.text.kinds import byte_level
from tests.service.text.test_output_parser import BY_NAME, FRAGMENTS, THOUGHTS, TOOLS, gathered, parts_of
from tests.service.text.test_text_model import ServedModel

STOP, LENGTH = runner_pb2.FINISH_REASON_STOP, runner_pb2.FINISH_REASON_LENGTH


def divided(
    name: str, pieces: list[str], finish: runner_pb2.FinishReason = STOP
) -> list[runner_pb2.SampleChunk]:
    thoughts = THOUGHTS["openai" if name == "openai" else "think"]
    divider = ChunkParser(Parsing(OutputFormats(BY_NAME[name], thoughts), thoughts, TOOLS, call_key="k"), 0)
    chunks = [runner_pb2.SampleChunk(item_id="0", text=piece, token_ids=[1]) for piece in pieces]
    chunks.append(runner_pb2.SampleChunk(item_id="0", finish_reason=finish))
    for chunk in chunks:
        divider.parse(chunk)
    return chunks


@given(
    st.sampled_from(sorted(BY_NAME)),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join),
    st.data(),
)
def test_an_answer_is_that_of_the_parser(name: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
    content, thoughts, calls = gathered(
        parts_of(BY_NAME[name], [text], "openai" if name == "openai" else "think")
    )
    for each in (pieces, list(text)):
        chunks = divided(name, each)
        answer, choice = Answer("0", 0), Choice(0)
        for chunk in chunks:
            answer.add(chunk_of(chunk))
            choice.blocks.keep(choice.parts(chunk))
        found = [(call.name, call.arguments_json) for call in answer.tool_calls]
        assert (answer.reasoning_content, found) == (thoughts, calls)
        assert answer.finish_reason == ("tool_calls" if calls else "stop")
        # A long chunk does not say what was between two of its calls.
        assert sorted(answer.text) == sorted(content)
        blocks = choice.blocks
        assert "".join(blocks.texts(TEXT)) == answer.text and "".join(blocks.texts(THINKING)) == thoughts
        assert [(block.name, block.text) for block in blocks.all if block.kind == CALL] == calls
        assert chunks[-1].usage.reasoning_tokens <= len(each)
        assert chunks == divided(name, each), "the ids of calls, too"


def test_a_call_that_is_cut_off() -> None:
    begin, rest = '<tool_call>{"name": "stop", "arguments": {', '"a": 1'
    first, second, last = divided("hermes", [begin, rest], LENGTH)
    assert [call.name for call in first.tool_calls] == ["stop"] and second.tool_calls[
        0
    ].arguments_json == rest
    assert dict(last.malformed_calls) == {0: begin + rest} and last.finish_reason == LENGTH


def item(**parts: object) -> runner_pb2.ExecuteItem:
    made = runner_pb2.ExecuteItem(item_id="0")
    made.chat.tools_json = json.dumps([{"function": {"name": "f"}}, {"function": {"name": "g"}}])
    made.answer_parts.MergeFrom(runner_pb2.AnswerParts(**parts))  # type: ignore[arg-type]
    return made


def test_the_item_of_the_caller_stays_as_it_is() -> None:
    """A repeated request is compared with it."""
    hermes = formats_of('{{ tools }}<tool_call>{"name": "", "arguments": ')
    for parts in ({"tool_choice": "TOOL_CHOICE_REQUIRED"}, {"tool_choice": "TOOL_CHOICE_NONE"}, {}):
        asked = item(**parts)
        made, parsing = parsing_of(asked, hermes)
        assert asked == item(**parts) and parsing is not None
        assert bool(made.chat.tools_json) == (parts.get("tool_choice") != "TOOL_CHOICE_NONE")
        assert made.HasField("constraint") == parsing.is_forced
        assert parsing.is_direct == parsing.is_forced


@pytest.mark.parametrize(
    "tools", ["{}", "[1]", '[{"function": {}}]', '[{"function": {"name": "f", "parameters": 1}}]']
)
def test_what_is_no_list_of_tools(tools: str) -> None:
    asked = item()
    asked.chat.tools_json = tools
    with pytest.raises(InvalidArgument) as caught:
        parsing_of(asked, OutputFormats())
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", "chat.tools_json")


def test_schemas_of_calls_that_are_too_large_for_a_grammar() -> None:
    """Those of functions to call; what describes these is no part of it."""
    asked, described = item(tool_choice="TOOL_CHOICE_REQUIRED"), "a" * (1 << 16)
    asked.chat.tools_json = json.dumps([{"function": {"name": "f", "description": described}}])
    assert parsing_of(asked, OutputFormats())[1] is not None
    parameters = {"description": described}
    asked.chat.tools_json = json.dumps([{"function": {"name": "f", "parameters": parameters}}])
    with pytest.raises(InvalidArgument) as caught:
        parsing_of(asked, OutputFormats())
    assert (caught.value.reason, caught.value.field) == ("BAD_CONSTRAINT", "chat.tools_json")


@pytest.mark.parametrize(
    ("context", "prompt", "thoughts"),
    [
        ("<think>\n", "", ""),
        ("<think>\nSo", " it", "So it"),
        ("<think>a</think>b", "c", None),
        ("<think>a</think>b<think>", "c", "c"),
        ("<think>" + "a b " * 9000, "c", "a b"),
        # A marker that two slices have, and one that a user has written.
        ("<think>" + "a" * 4094, "", "a"),
        ("What is <think>?<end>", "It", None),
    ],
)
async def test_thoughts_that_the_prompt_has_begun(context: str, prompt: str, thoughts: str | None) -> None:
    """Wherever: in earlier tokens of the cache, or long ago."""
    served, tokenizer = ServedModel(), byte_level()
    form = THOUGHTS["think"]
    before = array("I", tokenizer.encode(context).ids)
    asked = runner_pb2.ExecuteItem(cache=runner_pb2.CachePrompt(token_ids=tokenizer.encode(prompt).ids))
    for is_direct in (False, True):
        parsing = Parsing(OutputFormats(None, form), form, is_direct=is_direct)
        tokens, found = await encoded_prompt(asked, parsing, served.text, max_tokens=1 << 20, context=before)
        assert found is not None
        added = tokenizer.decode(tokens).removeprefix(prompt)
        if is_direct:
            assert added == ("" if thoughts is None else "</think>\n\n")
        else:
            assert (added, found.is_thinking, found.goes_on) == ("", thoughts is not None, bool(thoughts))
    served.text.close()


CONSTANT = {"properties": {}, "$ref": "#/x", "$schema": "y"}
REFERRING = {"$defs": {"A": {"const": 1}}, "properties": {"a": {"$ref": "#/$defs/A"}}}


def forced(parameters: Any, name: str = "f") -> runner_pb2.ExecuteItem:
    tools = [{"function": {"name": name, "parameters": parameters}}]
    asked = runner_pb2.AnswerParts(tools_json=json.dumps(tools), tool_choice=runner_pb2.TOOL_CHOICE_REQUIRED)
    return parsing_of(runner_pb2.ExecuteItem(answer_parts=asked), OutputFormats(None))[0]


@pytest.mark.parametrize(
    ("parameters", "valid", "wrong"),
    [
        # Values, and properties with the names of keywords, are no schemas.
        ({"properties": {"a": {"const": CONSTANT}}}, {"a": CONSTANT}, {"a": {}}),
        ({"properties": {"a": {"enum": [CONSTANT]}}}, {"a": CONSTANT}, {"a": {}}),
        (
            {"properties": {"properties": {"type": "object"}, "$schema": {"const": 1}}},
            {"properties": {"b": 1}, "$schema": 1},
            {"additionalProperties": 1},
        ),
        ({"properties": {"not": {"properties": {"b": {}}}}}, {"not": {"b": 1}}, {"not": {"c": 1}}),
        # Of one that has an id, references lead to its own parts.
        ({"$id": "https://example.org/s", **REFERRING}, {"a": 1}, {"a": 2}),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", **REFERRING}, {"a": 1}, {"a": 2}),
        # Arguments are an object.
        ({"type": "string"}, {}, "text"),
        ({"type": ["object", "null"]}, {}, None),
    ],
)
def test_calls_are_valid_under_the_schema_of_their_function(parameters: Any, valid: Any, wrong: Any) -> None:
    grammar = json.loads(forced(parameters).constraint.json_schema)
    check = jsonschema.Draft202012Validator(grammar).is_valid
    assert check([{"name": "f", "arguments": valid}])
    assert not check([{"name": "f", "arguments": wrong}])


ROME = {"name": "weather", "arguments": {"city": "Rome"}}
STOPS = {"name": "stop", "arguments": {}}
NO_CALLS: list[Any] = [
    [],
    [{"name": "weather", "arguments": {"city": "Oslo"}}],
    [{"name": "weather", "arguments": {"city": "Rome", "a": 1}}],
    [{"name": "stop", "arguments": {"a": 1}}],
    [{"name": "stop"}],
    [{"name": "other", "arguments": {}}],
]


@pytest.mark.parametrize(
    ("asked", "valid", "wrong"),
    [
        ({}, [[ROME, STOPS], [ROME], [STOPS]], []),
        ({"single_call": True}, [[ROME], [STOPS]], [[ROME, STOPS]]),
        ({"function": "weather"}, [[ROME]], [[ROME, STOPS], [STOPS]]),
    ],
)
def test_the_calls_that_may_be_forced(asked: dict[str, Any], valid: list[Any], wrong: list[Any]) -> None:
    """Over gRPC and HTTP: tests/e2e/test_tools.py."""
    tools = [{"function": each} for each in (WEATHER, {"name": "stop"})]
    parts = runner_pb2.AnswerParts(tool_choice="TOOL_CHOICE_REQUIRED", **asked)
    parts.tools_json = json.dumps(tools)
    made, _ = parsing_of(runner_pb2.ExecuteItem(answer_parts=parts), OutputFormats(None))
    check = jsonschema.Draft202012Validator(json.loads(made.constraint.json_schema)).is_valid
    assert all(map(check, valid)) and not any(map(check, wrong + NO_CALLS))


@pytest.mark.parametrize("name", ["my tool", 'a"b', "a\ud800", "n" * 257])
def test_a_name_that_no_call_can_have_is_refused(name: str) -> None:
    """Before, what the model was made to write was no call, but content."""
    with pytest.raises(InvalidArgument, match="name of letters, digits"):
        forced({}, name)


def test_unpaired_surrogates_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="unpaired surrogate") as refused:
        forced({"properties": {"\ud800": {}}})
    assert refused.value.reason == "BAD_CHAT"


def test_an_unknown_choice_is_refused() -> None:
    asked = runner_pb2.AnswerParts()
    asked.tool_choice = 99  # type: ignore[assignment]  # of a newer client
    with pytest.raises(InvalidArgument) as refused:
        parsing_of(runner_pb2.ExecuteItem(answer_parts=asked), OutputFormats(None))
    assert (refused.value.reason, refused.value.field) == ("BAD_TOOL_CHOICE", "answer_parts.tool_choice")
