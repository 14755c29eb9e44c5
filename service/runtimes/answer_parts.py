"""Parses the samples of an item into content, thoughts and tool calls, and forces calls.

A grammar forces a model to call tools: its answer is a JSON list of calls, each valid under its function's
schema. That needs no tool format of the model, and no support by its chat template.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from quire.v1 import runner_pb2

from service.api.server_state import ServerState
from service.errors import InvalidArgument, NoTokenizer
from service.text.bounded_json import tools_of
from service.text.call_values import MAX_CALLS, is_name
from service.text.constraints import MAX_GRAMMAR_BYTES
from service.text.output_formats import FORCED, OutputFormats, ReasoningFormat, formats_of
from service.text.output_parser import OutputParser
from service.text.text_model import TextModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NO_TOKENS: array[int] = array("I")
TOOLS = "chat.tools_json"
# More tokens than a marker has.
_LAST_TOKENS = 32
# How many tokens are decoded at once: about a millisecond.
_SLICE_TOKENS = 4096
_Schema = Mapping[str, Any]
_NO_ARGUMENTS: _Schema = {"properties": {}}
# Keywords whose schemas apply to the same value as the schema around them.
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"})
# Keywords whose values are schemas by names that the caller chose; and those whose values are no schemas.
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_NO_SCHEMAS = frozenset({"const", "enum", "default", "examples", "required", "type"})
_NOT_CLOSED = _COMBINING | {"$ref", "additionalProperties", "unevaluatedProperties", "patternProperties"}


@dataclass(frozen=True, slots=True)
class Parsing:
    """How the samples of an item are parsed.

    Attributes:
        formats: The formats of the text outside of thoughts.
        thoughts: The model's format of thoughts.
        tools: By the name of a function, the schema of its arguments. Empty: there are no calls.
        is_direct: Whether a sample must begin without thoughts, since a grammar constrains it.
        is_thinking: Whether it begins within thoughts, which the prompt has begun.
        goes_on: Whether the prompt already has a part of these thoughts.
        has_special_tokens: Whether special tokens are part of the text, since some are markers.
        dropped: The special tokens that are no markers.
        call_key: Determines the ids of calls, together with the index of the sample.
    """

    formats: OutputFormats
    thoughts: ReasoningFormat | None
    tools: Mapping[str, _Schema] = field(default_factory=dict)
    max_calls: int = MAX_CALLS
    is_direct: bool = False
    is_thinking: bool = False
    goes_on: bool = False
    has_special_tokens: bool = False
    dropped: frozenset[str] = frozenset()
    call_key: str = ""

    @property
    def is_forced(self) -> bool:
        return self.formats.tools is FORCED


class ChunkParser:
    """Parses the chunks of one sample, in order. The same tokens always have the same parts."""

    def __init__(self, parsing: Parsing, sample: int) -> None:
        self._parser = OutputParser(
            parsing.formats,
            parsing.tools,
            max_calls=parsing.max_calls,
            is_thinking=parsing.is_thinking,
            goes_on=parsing.goes_on,
            dropped=parsing.dropped,
            call_key=f"{parsing.call_key}\0{sample}",
        )
        self._whole_calls: set[int] = set()
        self._reasoning_tokens = 0

    def parse(self, chunk: runner_pb2.SampleChunk) -> None:
        """Replaces the text of a chunk by its parts, and the reason of the last chunk if it has calls."""
        was_thinking = self._parser.is_thinking
        parts = self._parser.push(chunk.text)
        if was_thinking or self._parser.is_thinking:
            self._reasoning_tokens += len(chunk.token_ids)
        if chunk.finish_reason:
            parts += self._parser.end()
        chunk.text = "".join(part.content for part in parts)
        chunk.reasoning_content = "".join(part.thoughts for part in parts)
        for part in parts:
            if part.begun:
                self._whole_calls.add(part.index)
                call_id, name = part.begun
                chunk.tool_calls.add(index=part.index, id=call_id, name=name)
            elif part.arguments:
                if not (chunk.tool_calls and chunk.tool_calls[-1].index == part.index):
                    chunk.tool_calls.add(index=part.index)
                chunk.tool_calls[-1].arguments_json += part.arguments
            elif part.broken:
                chunk.malformed_calls[part.index] = part.broken
                self._whole_calls.discard(part.index)
        if chunk.finish_reason:
            chunk.usage.reasoning_tokens = self._reasoning_tokens
        if chunk.finish_reason == runner_pb2.FINISH_REASON_STOP and self._whole_calls:
            chunk.finish_reason = runner_pb2.FINISH_REASON_TOOL_CALLS


def formats_of_model(state: ServerState) -> OutputFormats:
    """The formats in which the served model writes calls and thoughts. Raises NoWorker."""
    # All named templates: one may be only for chats with tools.
    templates = "".join(state.first_ready.chat_template.sources.values())
    return formats_of(templates, state.config.tool_call_parser, state.config.reasoning_parser)


def parsing_of(
    item: runner_pb2.ExecuteItem, model: OutputFormats
) -> tuple[runner_pb2.ExecuteItem, Parsing | None]:
    """An item as it is run (a copy if calls are forced or hidden), and how its samples are parsed, if at all.

    Raises InvalidArgument.
    """
    if not item.HasField("answer_parts"):
        return item, None
    asked = item.answer_parts
    tools = _schemas(item)
    choice = asked.tool_choice
    if choice not in runner_pb2.ToolChoice.values():
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts.tool_choice", "is not known")
    if asked.function and (choice != runner_pb2.TOOL_CHOICE_REQUIRED or asked.function not in tools):
        message = "is none of the tools" if choice == runner_pb2.TOOL_CHOICE_REQUIRED else "is not required"
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts.function", f"the function {message}")
    if choice == runner_pb2.TOOL_CHOICE_NONE:
        item, tools = _without_tools(item), {}
    max_calls = 1 if asked.single_call or asked.function else MAX_CALLS
    if choice != runner_pb2.TOOL_CHOICE_REQUIRED:
        is_direct = item.HasField("constraint")
        formats = OutputFormats(model.tools) if is_direct else model
        return item, Parsing(formats, model.reasoning, tools, max_calls, is_direct)
    if not tools:
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts.tool_choice", "there are no tools to call")
    if item.HasField("constraint"):
        message = "calls are not required together with another constraint"
        raise InvalidArgument("BAD_TOOL_CHOICE", "answer_parts.tool_choice", message)
    if asked.function:
        tools = {asked.function: tools[asked.function]}
    schema = _schema_of_calls(tools, max_calls)
    # A template that does not show tools, or in a form that is not known, would refuse them.
    forced = _without_tools(item) if model.tools is None else _copy(item)
    forced.constraint.json_schema = schema
    return forced, Parsing(OutputFormats(FORCED), model.reasoning, tools, max_calls, is_direct=True)


async def encoded_prompt(
    item: runner_pb2.ExecuteItem,
    parsing: Parsing | None,
    text: TextModel,
    *,
    max_tokens: int,
    context: array[int] = _NO_TOKENS,
) -> tuple[Sequence[int], Parsing | None]:
    """The tokens of an item's prompt, and the parsing completed by what prompt and tokenizer determine.

    If samples must have no thoughts, the prompt ends those that it begins. `context`: the tokens of a cache
    before the prompt. Raises as `TextModel.encode_chat`.
    """
    kind = item.WhichOneof("prompt")
    tokens: Sequence[int]
    if kind == "text":
        tokens = await text.encode(item.text, max_tokens=max_tokens)
    elif kind == "chat":
        tokens = await text.encode_chat(item.chat, max_tokens=max_tokens)
    else:
        # Not copied before its length is checked: there may be millions.
        tokens = item.cache.token_ids if kind == "cache" else item.tokens.token_ids
    if parsing is None:
        return tokens, None
    tokenizer = await text.tokenizer()
    if tokenizer is None:
        raise NoTokenizer
    special_ids, markers = await text.special_ids(), parsing.formats.markers
    special = special_ids.keys()
    if not item.special_tokens_in_text and markers & special:
        parsing = replace(parsing, has_special_tokens=True, dropped=frozenset(special - markers))
    # A prompt that is too long will be refused.
    if (form := parsing.thoughts) is None or len(tokens) > max_tokens:
        return tokens, parsing
    read = context + array("I", tokens) if context else tokens
    thoughts = await _unfinished_thoughts(read, form, tokenizer, special_ids)
    if not parsing.is_direct:
        return tokens, replace(parsing, is_thinking=thoughts is not None, goes_on=bool(thoughts))
    added = form.answer if thoughts is None else form.end + form.after
    last = tokenizer.decode(list(read[-_LAST_TOKENS:]), skip_special_tokens=False)
    if added and not last.endswith(added):
        more = await text.encode(added, max_tokens=len(added), add_special_tokens=False)
        tokens = [*tokens, *more]
    return tokens, parsing


async def _unfinished_thoughts(
    tokens: Sequence[int], form: ReasoningFormat, tokenizer: Tokenizer, special_ids: Mapping[str, int]
) -> str | None:
    """What there is of thoughts that are begun and not ended, at least its beginning. None: there are none.

    A special token that is no marker of thoughts ends them, too: what a user writes does not begin any.
    """
    others = {token_id for text, token_id in special_ids.items() if text not in form.opening + form.end}
    for end in range(len(tokens), 0, -_SLICE_TOKENS):
        # A marker may be cut by the slice after this one.
        part = list(tokens[max(0, end - _SLICE_TOKENS) : end + _LAST_TOKENS])
        other = next((index for index in reversed(range(len(part))) if part[index] in others), -1)
        text = tokenizer.decode(part[other + 1 :], skip_special_tokens=False)
        begun, ended = text.rfind(form.opening), text.rfind(form.end)
        if begun > ended:
            return text[begun + len(form.opening) :].strip()
        if other >= 0 or ended >= 0:
            return None
        await asyncio.sleep(0)
    return None


def _copy(item: runner_pb2.ExecuteItem) -> runner_pb2.ExecuteItem:
    copy = runner_pb2.ExecuteItem()
    copy.CopyFrom(item)
    return copy


def _without_tools(item: runner_pb2.ExecuteItem) -> runner_pb2.ExecuteItem:
    if not item.chat.tools_json:
        return item
    copy = _copy(item)
    copy.chat.ClearField("tools_json")
    return copy


def _schemas(item: runner_pb2.ExecuteItem) -> dict[str, _Schema]:
    """The schemas of the arguments of functions, by their names. Raises InvalidArgument."""
    of_chat = not item.answer_parts.tools_json
    path = TOOLS if of_chat else "answer_parts.tools_json"
    schemas: dict[str, _Schema] = {}
    for tool in tools_of(item.chat if of_chat else item.answer_parts, field=path):
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise InvalidArgument("BAD_CHAT", path, 'a tool is {"function": {"name": ...}}')
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidArgument("BAD_CHAT", path, "the parameters of a function are a JSON Schema")
        schemas[name] = parameters or {}
    return schemas


def _schema_of_calls(tools: Mapping[str, _Schema], max_calls: int) -> str:
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
        # The final grammar is at least as long.
        if len(json.dumps([*tools.values()], ensure_ascii=False)) > MAX_GRAMMAR_BYTES:
            message = f"the schemas of functions to call have at most {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidArgument("BAD_CONSTRAINT", TOOLS, message)
        for index, (name, parameters) in enumerate(tools.items()):
            place = f"#/$defs/{index}"
            if not is_name(name):
                message = "a function that has to be called has a name of letters, digits and _.:-"
                raise InvalidArgument("BAD_CHAT", TOOLS, message)
            own = _moved(_closed(parameters or _NO_ARGUMENTS), place)
            definitions[str(index)] = {**own, "type": "object"}
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
        text = json.dumps(schema, ensure_ascii=False)
        text.encode()
    except RecursionError:
        raise InvalidArgument("BAD_CHAT", TOOLS, "tools_json is nested too deeply") from None
    except UnicodeEncodeError:
        raise InvalidArgument("BAD_CHAT", TOOLS, "tools_json has an unpaired surrogate") from None
    return text


def _moved(schema: Any, place: str) -> Any:
    """A schema that is not the root any more, but at `place`. What it refers to moves with it."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$id" in schema:
        # It stays the root of what refers to its parts.
        return {name: each for name, each in schema.items() if name != "$schema"}
    moved = _changed(schema, lambda each: _moved(each, place))
    moved.pop("$schema", None)
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference + "/").startswith("#/"):
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
    closed = _changed(schema, _closed)
    closed |= {name: each for name, each in schema.items() if name in _COMBINING}
    if isinstance(schema.get("properties"), dict) and not _NOT_CLOSED & schema.keys():
        closed["additionalProperties"] = False
    return closed


def _changed(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A schema with each schema in it changed, and nothing else that looks like one."""
    changed: dict[str, Any] = {}
    for name, each in schema.items():
        if name in _BY_NAME and isinstance(each, dict):
            changed[name] = {key: change(one) for key, one in each.items()}
        else:
            changed[name] = each if name in _NO_SCHEMAS else change(each)
    return changed
