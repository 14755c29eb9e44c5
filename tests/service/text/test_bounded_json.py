"""The values of callers' JSON are counted before it is parsed, and too many are never parsed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.extensions.providers.dialects.base import parsed_json
from service.text import bounded_json
from service.text.bounded_json import MAX_BYTES, MAX_VALUES, check_chat, count_in_slices, parse, tools_of

# Repeated, each costs Python's parser 250 ms or more, and hundreds of MiB.
HOSTILE = ["[],", "{},", '"",', '{"a":"b"},', "1,"]


def counted(text: str, limit: int = 1 << 40) -> int:
    """In slices of three bytes, so that escapes and strings are cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounded_json, "_SLICE_BYTES", 3)
        *_, count = count_in_slices(text.encode(), limit)
    return count


def expected_count(value: Any) -> int:
    """What a value counts as: compound values by 8, and the commas."""
    if isinstance(value, str):
        return 8
    if isinstance(value, list):
        return 8 + max(0, len(value) - 1) + sum(map(expected_count, value))
    if isinstance(value, dict):
        return 8 + max(0, len(value) - 1) + 8 * len(value) + sum(map(expected_count, value.values()))
    return 0


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.text(st.sampled_from('",[{\\\n}]:')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_values_are_counted_without_parsing(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert counted(text) == expected_count(value)
    assert (counted(text, 7) > 7) == (expected_count(value) > 7)


@given(st.text(st.sampled_from('",[{\\a')))
def test_the_count_of_invalid_json_is_bounded(text: str) -> None:
    assert 0 <= counted(text) <= 8 * len(text)


def test_long_strings_are_counted_in_slices() -> None:
    for text in ("a" * (1 << 22), "\\n" * (1 << 20), ",[{" * (1 << 20)):
        slices = count_in_slices(json.dumps([text, 1, [text]]).encode(), 1 << 20)
        assert len(list(slices)) > 8


def tool_call(arguments: str, times: int = 1) -> runner_pb2.Chat:
    calls = [runner_pb2.ToolCall(name="f", arguments_json=arguments)] * times
    return runner_pb2.Chat(messages=[runner_pb2.ChatMessage(tool_calls=calls)])


@pytest.fixture
def no_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing anything fails the test."""

    def fail(text: str, **_: object) -> None:
        raise AssertionError(f"{len(text)} characters are parsed")

    monkeypatch.setattr(json, "loads", fail)


@pytest.mark.usefixtures("no_parsing")
@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("parse_field", [parse, parsed_json])
def test_too_many_values_are_not_parsed(parse_field: Callable[[str, str, str], Any], hostile: str) -> None:
    with pytest.raises(InvalidArgument, match="too large") as caught:
        parse_field("[" + hostile * (1 << 19) + "1]", "BAD_CHAT", "chat.tools_json")
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", "chat.tools_json")
    with pytest.raises(InvalidArgument, match="too large"):
        parse_field('"' + "a" * MAX_BYTES + '"', "BAD_CHAT", "chat.tools_json")


@pytest.mark.usefixtures("no_parsing")
@pytest.mark.parametrize("tools", ['["' + "a" * (1 << 18) + '"]', "[" + "{}," * 20_000 + "{}]"], ids=range(2))
def test_tools_have_narrower_limits(tools: str) -> None:
    """They are changed and written again before a model is shown them."""
    with pytest.raises(InvalidArgument, match="too large") as caught:
        tools_of(runner_pb2.Chat(tools_json=tools))
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", "chat.tools_json")


def test_ordinary_json_is_parsed() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}", "x": ["[,{"] * 9}} for n in range(500)]
    assert parse(json.dumps(tools), "BAD_CHAT", "chat.tools_json") == tools
    for wrong in ("{", "NaN", "[" * 10_000, "1" * 5000):
        with pytest.raises(InvalidArgument, match="is not JSON"):
            parse(wrong, "BAD_CHAT", "chat.tools_json")


@pytest.mark.usefixtures("no_parsing")
@pytest.mark.parametrize(
    ("chat", "field"),
    [
        (runner_pb2.Chat(tools_json="[" + "[]," * (1 << 19) + "1]"), "chat.tools_json"),
        (runner_pb2.Chat(tools_json='"' + "a" * MAX_BYTES + '"'), "chat.tools_json"),
        # Each part alone is within the limits.
        (tool_call("[" + "[]," * (1 << 10) + "1]", 64), "chat.messages[0].tool_calls[28].arguments_json"),
        (tool_call('"' + "a" * (1 << 16) + '"', 64), "chat.messages[0].tool_calls[31].arguments_json"),
        (tool_call("", MAX_VALUES // 8 + 1), "chat.messages"),
        (runner_pb2.Chat(messages=[runner_pb2.ChatMessage()] * 5000), "chat.messages"),
    ],
    ids=range(6),
)
async def test_all_json_of_a_chat_is_limited_together(chat: runner_pb2.Chat, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await check_chat(chat)
    assert (caught.value.reason, caught.value.field) == ("BAD_CHAT", field)
