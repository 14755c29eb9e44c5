"""Chunks of samples that are divided: put together they are the parts of the parser, however they are cut."""

from __future__ import annotations

import itertools
import json
from array import array

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
