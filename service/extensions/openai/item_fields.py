"""Tables that map fields of requests to fields of items of Execute, for both directions.

A route has a table of `ItemField`s. `set_fields` sets an item by it, and `param_of` finds the field of the
request that an error of the execution is about. Other fields are read by the route itself.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from quire.v1 import runner_pb2
from quire.v1.sampling_settings import SETTINGS, Setting

from service.api.validation import MAX_LOGIT_BIAS
from service.errors import InvalidArgument
from service.extensions.openai.fields import (
    Fields,
    array,
    bad_field,
    boolean,
    integer,
    number,
    string,
    strings,
    unsupported,
)
from service.extensions.openai.messages import MAX_TOOLS, parse_messages
from service.runtimes.items import MAX_BAD_WORDS, MAX_SAMPLES, MAX_STOPS

# Bounds the length of a list. Items have a lower limit.
_MAX_STOP_IDS = 1024
_MAX_ALLOWED_IDS = 1 << 20
_MAX_CHOICES = 1024
_MAX_DOCUMENTS = 1024
_ANY_OBJECT = '{"type":"object"}'
_NEUTRAL_OF_STRUCTURED = {
    "disable_fallback": False,
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
}
# Further template variables that values of `reasoning_effort` set.
_EFFORTS = {"none": {"enable_thinking": False}}
_TOOL_CHOICES = {
    "auto": runner_pb2.TOOL_CHOICE_UNSPECIFIED,
    "none": runner_pb2.TOOL_CHOICE_NONE,
    "required": runner_pb2.TOOL_CHOICE_REQUIRED,
}
MAX_TOP_LOGPROBS = 20
MAX_ID = (1 << 32) - 1
_SEEDS = 1 << 64

# Sets fields of an item from a value of a request (not null) with a path. Raises InvalidArgument.
SetField: TypeAlias = Callable[[runner_pb2.ExecuteItem, Any, str], None]


@dataclass(frozen=True, slots=True)
class ItemField:
    """A field of a request.

    Attributes:
        name: The field's name in its object.
        target: The field of an item, or the message in it, that it sets.
        set: None: the route sets it, because more than this value is needed.
        also: Further fields of an item that stand for this field in errors.
        parent: The path of its object in the request, with a dot at the end.
    """

    name: str
    target: str
    set: SetField | None
    also: tuple[str, ...] = ()
    parent: str = ""


def set_fields(item: runner_pb2.ExecuteItem, fields: Fields, table: Sequence[ItemField]) -> None:
    """Sets an item from the fields that are present, in the order of the table. Raises InvalidArgument."""
    for one in table:
        if one.set is not None and (value := fields.raw(one.name)) is not None:
            one.set(item, value, fields.path(one.name))


def given(fields: Fields, table: Sequence[ItemField]) -> tuple[ItemField, ...]:
    """The entries of a table whose fields are present: several may set the same field of an item."""
    return tuple(one for one in table if fields.has(one.name))


# The prefix of the path of an item's field, in errors of an execution.
_BEFORE = re.compile(r"^(?:items\[\d+\]\.|output\.)+")


def param_of(field: str, *tables: Sequence[ItemField]) -> str:
    """The request's field for a field of an item that an error names, from the first table that has it."""
    path = _BEFORE.sub("", field)
    for table in tables:
        targets = [(target, one) for one in table for target in (one.target, *one.also)]
        # The longest target is the most specific.
        for target, one in sorted(targets, key=lambda each: len(each[0]), reverse=True):
            rest = path.removeprefix(target)
            if path.startswith(target) and rest[:1] in ("", ".", "["):
                # List indexes are the same in both; names of fields are not.
                inner = rest.replace(".arguments_json", ".function.arguments") if rest[:1] == "[" else ""
                return f"{one.parent}{one.name}{inner}"
    return path.removeprefix("sampling.")


def renamed(path: str, names: Mapping[str, str]) -> str:
    """A path whose longest prefix in `names` is replaced by its value there."""
    ends = [len(path), *(found.start() for found in reversed([*re.finditer(r"[.\[]", path)]))]
    end = next((end for end in ends if path[:end] in names), 0)
    return names.get(path[:end], "") + path[end:]


# Functions that set fields.


def plain(
    name: str, target: str, check: Callable[..., Any], *bounds: int, also: tuple[str, ...] = ()
) -> ItemField:
    """A field that is copied to the item after a check by a function of `fields`. Lists are appended."""
    *parents, last = target.split(".")

    def set_it(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
        message, checked = functools.reduce(getattr, parents, item), check(value, path, *bounds)
        if isinstance(checked, list):
            getattr(message, last).extend(checked)
        else:
            setattr(message, last, checked)

    return ItemField(name, target, set_it, also)


def _sampling(setting: Setting) -> ItemField:
    target = f"sampling.{setting.name}"
    if setting.type is float:
        return plain(setting.name, target, number)

    def limit(value: object, path: str) -> int:
        # -1 means no limit in other servers, and 0 here.
        return max(0, integer(value, path, -1, int(setting.maximum)))

    return plain(setting.name, target, limit)


def _seed(value: object, path: str) -> int:
    return integer(value, path, -_SEEDS // 2, _SEEDS - 1) % _SEEDS


def _stops(value: object, path: str) -> list[str]:
    return [string(value, path)] if isinstance(value, str) else strings(value, path, MAX_STOPS)


def _stop_ids(value: object, path: str) -> list[int]:
    return token_ids(array(value, path, _MAX_STOP_IDS), path)


def _negated(value: object, path: str) -> bool:
    return not boolean(value, path)


def _set_salt(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    """Refuses an empty salt, which would have no effect."""
    item.cache_salt = string(value, path)
    if not item.cache_salt:
        raise bad_field(path, "is required")


def _set_variables(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise bad_field(path, "must be an object")
    if value:
        given = json.loads(item.chat.variables_json or "{}")
        item.chat.variables_json = _json({**given, **value}, path)


def _set_effort(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    effort = string(value, path)
    _set_variables(item, {"reasoning_effort": effort, **_EFFORTS.get(effort, {})}, path)


def _set_documents(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    if array(value, path, _MAX_DOCUMENTS):
        _set_variables(item, {"documents": value}, path)


def _set_prediction(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    """Makes drafts from the prompt: a prediction repeats most of it."""
    fields = Fields(value, path)
    if fields.raw("type") != "content":
        raise bad_field(fields.path("type"), "must be content")
    fields.raw("content")
    fields.refuse_others()
    item.speculation.method = runner_pb2.SPECULATION_METHOD_PROMPT_LOOKUP


def _set_bias(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise bad_field(path, f"must be an object of at most {MAX_LOGIT_BIAS} tokens")
    for name, bias in value.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= MAX_ID):
            raise bad_field(path, "must have token ids as keys")
        item.sampling.logit_bias[int(name)] = number(bias, f"{path}[{name}]")


def _set_logprobs(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    """For completions, where the value is the number of alternatives to each token."""
    item.logprobs, item.top_logprobs = True, integer(value, path, 0, MAX_TOP_LOGPROBS)


def _set_tools(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    tools = array(value, path, MAX_TOOLS)
    for index, tool in enumerate(tools):
        inner = Fields(tool, f"{path}[{index}]")
        if inner.raw("type") != "function":
            raise bad_field(inner.path("type"), "must be function")
        function = Fields(inner.raw("function"), inner.path("function"))
        function.required("name")
        if not isinstance(function.raw("parameters"), dict | None):
            raise bad_field(function.path("parameters"), "must be an object")
    if tools:
        item.chat.tools_json = _json(tools, path)


def _set_tool_choice(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    parts = item.answer_parts
    if isinstance(value, str):
        if value not in _TOOL_CHOICES:
            raise bad_field(path, "must be none, auto, required, or name a function")
        parts.tool_choice = _TOOL_CHOICES[value]
        return
    fields = Fields(value, path)
    if fields.raw("type") != "function":
        raise unsupported(fields.path("type"), "must be function")
    function = Fields(fields.raw("function"), fields.path("function"))
    parts.tool_choice, parts.function = runner_pb2.TOOL_CHOICE_REQUIRED, function.required("name")
    function.refuse_others()
    fields.refuse_others()


def _set_parallel(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    is_parallel = boolean(value, path)
    # Without tools it has no effect.
    item.answer_parts.single_call = not is_parallel and bool(item.chat.tools_json)


def _set_format(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    form = Fields(value, path)
    kind = form.raw("type")
    if kind == "json_object":
        # llama.cpp accepts a schema here, and instructor sends it.
        schema = form.raw("schema")
        text = _ANY_OBJECT if schema is None else _object(schema, form.path("schema"))
        _set_constraint(item, path, json_schema=text)
    elif kind == "json_schema":
        inner = Fields(form.raw("json_schema"), form.path("json_schema"))
        text = _object(inner.raw("schema"), inner.path("schema"))
        _set_constraint(item, path, json_schema=text)
        inner.refuse_others({"name", "description", "strict"})
    elif kind != "text":
        raise bad_field(form.path("type"), "must be text, json_object or json_schema")
    form.refuse_others()


def _object(value: Any, path: str) -> str:
    """Encodes an object as JSON."""
    if not isinstance(value, dict):
        raise bad_field(path, "must be an object")
    return _json(value, path)


def _set_constraint(item: runner_pb2.ExecuteItem, path: str, **kind: str) -> None:
    """Sets a constraint of this kind. Without a kind, only checks that there is no other constraint."""
    if item.HasField("constraint"):
        raise bad_field(path, "is one constraint too many: only one can be")
    for name, text in kind.items():
        if not text:
            raise bad_field(path, "must not be empty")
        setattr(item.constraint, name, text)


def _set_schema(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    """Sets a JSON schema, given as a value or as its text."""
    schema = string(value, path) if isinstance(value, str) else _json(value, path)
    _set_constraint(item, path, json_schema=schema)


def _set_regex(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    _set_constraint(item, path, regex=string(value, path))


def _set_grammar(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    _set_constraint(item, path, lark=string(value, path))


def _set_choice(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    choices = strings(value, path, _MAX_CHOICES)
    if not choices:
        raise bad_field(path, "must have at least one entry")
    _set_constraint(item, path, lark="start: " + " | ".join(json.dumps(each) for each in choices))


def _set_any_object(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    if boolean(value, path):
        _set_constraint(item, path, json_schema=_ANY_OBJECT)


_STRUCTURED: Mapping[str, SetField] = {
    "json": _set_schema,
    "regex": _set_regex,
    "choice": _set_choice,
    "grammar": _set_grammar,
    "json_object": _set_any_object,
}


def _set_structured(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    """Sets vLLM's `structured_outputs`."""
    fields = Fields(value, path)
    for name, set_it in _STRUCTURED.items():
        if (inner := fields.raw(name)) is not None:
            set_it(item, inner, fields.path(name))
    fields.refuse_others(neutral=_NEUTRAL_OF_STRUCTURED)
    if not item.HasField("constraint"):
        raise bad_field(path, f"needs one of {', '.join(_STRUCTURED)}")


def _set_allowed(item: runner_pb2.ExecuteItem, value: Any, path: str) -> None:
    allowed = array(value, path, _MAX_ALLOWED_IDS)
    _set_constraint(item, path)
    if not allowed:
        raise InvalidArgument("BAD_MASK", path, "no token is allowed")
    item.constraint.mask.allowed.ids.extend(token_ids(allowed, path))


def token_ids(values: list[Any], field: str) -> list[int]:
    """Checks a list of token ids of any length. Raises InvalidArgument."""
    # There may be a million, so they are checked one by one only to find the invalid one.
    if set(map(type, values)) - {int} or (values and not 0 <= min(values) <= max(values) <= MAX_ID):
        for index, value in enumerate(values):
            if type(value) is not int or not 0 <= value <= MAX_ID:
                integer(value, f"{field}[{index}]", 0, MAX_ID)
    return values


def _json(value: object, field: str) -> str:
    try:
        return string(json.dumps(value, ensure_ascii=False), field)
    except RecursionError:
        raise bad_field(field, "is nested too deeply") from None


# The tables.

_MAX_TOKENS = plain("max_tokens", "max_tokens", integer, 1, MAX_ID)
_COMMON = (
    plain("n", "n", integer, 1, MAX_SAMPLES),
    plain("stop", "stop", _stops),
    plain("stop_token_ids", "stop_token_ids", _stop_ids),
    *map(_sampling, SETTINGS),
    plain("seed", "sampling.seed", _seed),
    ItemField("logit_bias", "sampling.logit_bias", _set_bias),
    plain("ignore_eos", "ignore_eos", boolean),
    plain("min_tokens", "min_tokens", integer, 0, MAX_ID),
    plain("bad_words", "bad_words", strings, MAX_BAD_WORDS),
    ItemField("cache_salt", "cache_salt", _set_salt),
    ItemField("allowed_token_ids", "constraint.mask", _set_allowed),
    ItemField("structured_outputs", "constraint", _set_structured),
)
# Fields of both routes that return texts.
_TEXTS = (
    *_COMMON,
    plain("skip_special_tokens", "special_tokens_in_text", _negated),
    ItemField("guided_json", "constraint", _set_schema),
    ItemField("guided_regex", "constraint.regex", _set_regex),
    ItemField("guided_choice", "constraint", _set_choice),
    ItemField("guided_grammar", "constraint.lark", _set_grammar),
    ItemField("prediction", "speculation", _set_prediction),
)
# Fields of /v1/completions. Each of its prompts becomes an item.
COMPLETION = (
    *_TEXTS,
    _MAX_TOKENS,
    ItemField("logprobs", "top_logprobs", _set_logprobs),
    ItemField("prompt", "text", None, also=("tokens",)),
)
# Fields of /v1/chat/completions.
CHAT = (
    *_TEXTS,
    _MAX_TOKENS,
    # After the older name, which it overrides.
    plain("max_completion_tokens", "max_tokens", integer, 1, MAX_ID),
    plain("logprobs", "logprobs", boolean),
    plain("top_logprobs", "top_logprobs", integer, 0, MAX_TOP_LOGPROBS),
    # Errors about tokens are about the messages, which the server tokenizes.
    plain("messages", "chat.messages", parse_messages, also=("chat", "tokens")),
    ItemField("tools", "chat.tools_json", _set_tools, also=("answer_parts.tools_json",)),
    ItemField("tool_choice", "answer_parts.tool_choice", _set_tool_choice),
    ItemField("name", "answer_parts.function", None, parent="tool_choice.function."),
    ItemField("parallel_tool_calls", "answer_parts.single_call", _set_parallel),
    ItemField("response_format", "constraint", _set_format),
    ItemField("documents", "chat.variables_json", _set_documents),
    ItemField("reasoning_effort", "chat.variables_json", _set_effort),
    ItemField("chat_template_kwargs", "chat.variables_json", _set_variables),
    plain("continue_final_message", "chat.continue_last_message", boolean),
    plain("add_generation_prompt", "chat.omit_generation_prompt", _negated),
)
# Fields of `sampling_params` of /inference/v1/generate.
GENERATE_PARAMS = tuple(
    replace(one, parent="sampling_params.")
    for one in (
        *_COMMON,
        _MAX_TOKENS,
        ItemField("logprobs", "top_logprobs", None),
    )
)
# Its other fields.
GENERATE_REQUEST = (
    ItemField("cache_salt", "cache_salt", _set_salt),
    ItemField("token_ids", "tokens.token_ids", None),
)
GENERATE = (*GENERATE_PARAMS, *GENERATE_REQUEST)
