"""The tools of a chat, and which of them its answer has to call or may call.

A model that has to call tools is made to by a grammar: its answer is a JSON list of calls, each valid under
its function's schema. That needs no format of the model's own, and no support by its chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.v1 import runner_pb2

from service.extensions.openai.fields import Fields, bad_field, boolean, unsupported
from service.extensions.openai.models import ResolvedModel
from service.extensions.openai.output_formats import FORCED, OutputFormats, ReasoningFormat
from service.extensions.openai.output_parser import MAX_CALLS, OutputParser

_Schema = Mapping[str, Any]
_NO_ARGUMENTS: _Schema = {"properties": {}}
# Keywords whose schemas are true of the value that the schema around them is true of.
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
_NOT_CLOSED = _COMBINING | {"$ref", "additionalProperties", "unevaluatedProperties", "patternProperties"}


@dataclass(frozen=True, slots=True)
class Reading:
    """How the answers of a chat are divided into content, thoughts and calls.

    Attributes:
        formats: Of what follows, or comes between, thoughts. `thoughts`: that of the model.
        tools: The schemas of arguments by the names of functions; empty: there are no calls.
        with_thoughts: Whether thoughts are returned.
        is_direct: Whether an answer must begin without thoughts, since a grammar constrains it.
    """

    formats: OutputFormats
    thoughts: ReasoningFormat | None
    tools: Mapping[str, _Schema] = field(default_factory=dict)
    max_calls: int = MAX_CALLS
    with_thoughts: bool = True
    is_direct: bool = False

    def parser(self, *, is_thinking: bool, dropped: frozenset[str]) -> OutputParser:
        """For one answer. See `OutputParser`."""
        return OutputParser(
            self.formats, self.tools, max_calls=self.max_calls, is_thinking=is_thinking, dropped=dropped
        )


def reading_of(item: runner_pb2.ExecuteItem, fields: Fields, model: ResolvedModel) -> Reading | None:
    """Reads what a request says of tools and thoughts. Sets the item's constraint if calls are forced.

    None: answers are content only, or a provider divides them. Raises InvalidArgument.
    """
    tools = _schemas(fields.raw("tools") or [], fields.path("tools"))
    choice = _choice(fields.raw("tool_choice"), fields.path("tool_choice"), tools)
    is_parallel = fields.get("parallel_tool_calls", boolean) is not False
    with_thoughts = fields.get("include_reasoning", boolean) is not False
    if not model.is_local:
        _check_for_provider(choice, is_parallel=is_parallel or not tools)
    if choice == "none":
        item.chat.ClearField("tools_json")
        tools = {}
    if not model.is_local:
        return None
    max_calls = MAX_CALLS if is_parallel else 1
    if choice in ("none", "auto"):
        is_direct = item.HasField("constraint")
        formats = OutputFormats(model.formats.tools) if is_direct else model.formats
        return Reading(formats, model.formats.reasoning, tools, max_calls, with_thoughts, is_direct)
    if item.HasField("constraint"):
        raise unsupported("tool_choice", "only none and auto go with another constraint of the answer")
    if choice != "required":
        tools = {choice: tools[choice]}
        max_calls = 1
    item.constraint.json_schema = _schema_of_calls(tools, max_calls, fields.path("tools"))
    if model.formats.tools is None:
        # The template does not show tools to the model, or in a form that is not known.
        item.chat.ClearField("tools_json")
    return Reading(OutputFormats(FORCED), model.formats.reasoning, tools, max_calls, is_direct=True)


def _check_for_provider(choice: str, *, is_parallel: bool) -> None:
    if choice not in ("none", "auto"):
        raise unsupported("tool_choice", "must be none or auto for a provider")
    if not is_parallel:
        raise unsupported("parallel_tool_calls", "a provider decides how many tools it calls")


def _schemas(tools: list[Any], path: str) -> dict[str, _Schema]:
    """The schemas of the arguments of functions, by their names. The tools were checked by `item_fields`."""
    schemas: dict[str, _Schema] = {}
    for index, tool in enumerate(tools):
        function = Fields(tool["function"], f"{path}[{index}].function")
        parameters = function.raw("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise bad_field(function.path("parameters"), "must be an object")
        schemas[function.required("name")] = parameters or {}
    return schemas


def _choice(value: object, path: str, tools: Mapping[str, _Schema]) -> str:
    """none, auto, required, or the name of a function."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise bad_field(path, "must be none, auto, required, or name a function")
        if value == "required" and not tools:
            raise bad_field(path, "needs tools")
        return value
    fields = Fields(value, path)
    if fields.raw("type") != "function":
        raise unsupported(fields.path("type"), "must be function")
    function = Fields(fields.raw("function"), fields.path("function"))
    name = function.required("name")
    if name not in tools:
        raise bad_field(function.path("name"), "is none of the tools")
    function.refuse_others()
    fields.refuse_others()
    return name


def _schema_of_calls(tools: Mapping[str, _Schema], max_calls: int, path: str) -> str:
    """The schema of a list of calls, in the form of `FORCED`. Raises InvalidArgument."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": max_calls,
        "items": {"anyOf": calls},
        "$defs": definitions,
    }
    try:
        for index, (name, parameters) in enumerate(tools.items()):
            place = f"#/$defs/{index}"
            own = _moved(_closed(parameters or _NO_ARGUMENTS), place)
            definitions[str(index)] = {"type": "object", **own}
            properties = {"name": {"const": name}, "arguments": {"$ref": place}}
            required = ["name", "arguments"]
            calls.append(
                {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                }
            )
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise bad_field(path, "is nested too deeply") from None


def _moved(schema: Any, place: str) -> Any:
    """A schema that is not the root any more, but at `place`. What it refers to moves with it."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(each, place) for name, each in schema.items() if name != "$schema"}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _closed(schema: Any) -> Any:
    """A schema whose objects have no properties but those that it declares, unless it says so.

    Where several schemas are true of one value, each declares only some of its properties.
    """
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items() if name not in _COMBINING}
    closed |= {name: each for name, each in schema.items() if name in _COMBINING}
    if isinstance(schema.get("properties"), dict) and not _NOT_CLOSED & schema.keys():
        closed["additionalProperties"] = False
    return closed
