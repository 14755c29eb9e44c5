"""JSON of callers is counted before it is parsed, and what is too much of it is never parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.runtimes.remote.dialects.base import parsed_json
from service.text.bounded_json import MAX_BYTES, MAX_VALUES, check_chat, counting, estimated, parsed

# Each some 250 ms or more of Python's parser, and hundreds of MiB.
HOSTILE = ["[],", "{},", '"",', '{"a":"b"},', "1,"]


def counted(text: str, most: int = 1 << 40) -> int:
    slices = counting(text.encode(), most)
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return int(end.value)


def weight(value: Any) -> int:
    """What there is in a value, with the commas between it."""
    if isinstance(value, str):
        return 8
    if isinstance(value, list):
        return 8 + max(0, len(value) - 1) + sum(map(weight, value))
    if isinstance(value, dict):
        return 8 + max(0, len(value) - 1) + 8 * len(value) + sum(map(weight, value.values()))
    return 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text(st.sampled_from('",[{\\\n}]:')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_values_are_counted_without_being_made(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert counted(text) == weight(value) <= estimated(text.encode())
    assert (counted(text, 7) > 7) == (weight(value) > 7)


@given(st.text(st.sampled_from('",[{\\a')))
def test_what_is_no_json_is_counted_to_its_end(text: str) -> None:
    assert 0 <= counted(text) <= 8 * len(text)
    assert counted(text) <= estimated(text.encode())


def test_long_texts_are_counted_in_slices() -> None:
    for text in ("a" * (1 << 22), "\\n" * (1 << 20), ",[{" * (1 << 20)):
        slices = counting(json.dumps([text, 1, [text]]).encode(), 1 << 20)
        assert len(list(slices)) > 8


def tool_call(arguments: str, times: int = 1) -> runner_pb2.Chat:
    calls = [runner_pb2.ToolCall(name="f", arguments_json=arguments)] * times
    return runner_pb2.Chat(messages=[runner_pb2.ChatMessage(tool_calls=calls)])


@pytest.fixture
def unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is parsed fails the test."""

    def fail(text: str, **_: object) -> None:
        raise AssertionError(f"{len(text)} characters are parsed")

    monkeypatch.setattr(json, "loads", fail)


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("parse", [parsed, parsed_json])
def test_too_many_values_are_not_parsed(parse: Callable[[str, str, str], Any], hostile: str) -> None:
    with pytest.raises(InvalidArgument, match="too large") as caught:
        parse("[" + hostile * (1 << 19) + "1]", "BAD_CHAT", "chat.tools_json")
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", "chat.tools_json")
    with pytest.raises(InvalidArgument, match="too large"):
        parse('"' + "a" * MAX_BYTES + '"', "BAD_CHAT", "chat.tools_json")


def test_what_is_usual_is_parsed() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "x": ["[,{"] * 9}} for n in range(500)]
    assert parsed(json.dumps(tools), "BAD_CHAT", "chat.tools_json") == tools
    for wrong in ("{", "NaN", "[" * 10_000, "1" * 5000):
        with pytest.raises(InvalidArgument, match="is not JSON"):
            parsed(wrong, "BAD_CHAT", "chat.tools_json")


@pytest.mark.usefixtures("unparsed")
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (runner_pb2.Chat(tools_json="[" + "[]," * (1 << 19) + "1]"), "chat.tools_json"),
        (runner_pb2.Chat(tools_json='"' + "a" * MAX_BYTES + '"'), "chat.tools_json"),
        # No single one is too large.
        (
            tool_call("[" + "[]," * (1 << 10) + "1]", 64),
            "chat.messages[0].tool_calls[28].arguments_json",
        ),
        (tool_call('"' + "a" * (1 << 16) + '"', 64), "chat.messages[0].tool_calls[31].arguments_json"),
        (tool_call("", MAX_VALUES // 8 + 1), "chat.messages"),
        (runner_pb2.Chat(messages=[runner_pb2.ChatMessage()] * 5000), "chat.messages"),
    ],
    ids=range(6),
)
async def test_all_json_of_a_chat_is_bounded_together(asked: runner_pb2.Chat, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await check_chat(asked)
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", field)


async def test_marks_in_the_arguments_of_calls_are_no_values() -> None:
    await check_chat(tool_call(json.dumps({"content": 'if (a[0], {"b"})\n' * 600}), 64))
