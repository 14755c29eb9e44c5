"""The grammar of forced calls says what the schemas of tools say; hostile ones are refused by name."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from quire.v1 import runner_pb2

from service.errors import InvalidArgument
from service.runtimes.answer_parts import parsing_of
from service.text.output_formats import OutputFormats

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
