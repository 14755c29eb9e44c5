"""Reads names, arguments and values of tool calls that are whole texts, as JSON. Pure."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping
from typing import Any

from service.text import bounded_json

MAX_CALLS = 128
# The most strings, operators and spaces of a Python expression. Its parser takes ten microseconds for each.
_MAX_PYTHON_MARKS = 1 << 12
# A string with its prefix, or a comment.
_PYTHON_TEXT = re.compile(
    r"""([a-z]{0,2})('''|\"""|'|")(?:\\.?|(?!\2).)*+(?:\2)?|#[^\n]*""", re.DOTALL | re.IGNORECASE
)
# The prefix of a string with expressions in it: no value, and its parser takes minutes for a long one.
_FORMATTED = re.compile("[ft]r?'", re.IGNORECASE)
_NAME = re.compile(r"[\w.:\-]{1,256}")
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)(\s*:)')
# Values of parameters as the template of Qwen3-Coder writes them, and the types of JSON's values.
_PYTHON_VALUES = {"True": True, "False": False, "None": None}
_KINDS: Mapping[type, Collection[str]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: (),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
_PYTHON_ERRORS = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class NoCall(Exception):
    """The text that was read is no call, and nothing of it was returned."""


def is_name(text: str) -> bool:
    """Whether a function may have this name."""
    return _NAME.fullmatch(text) is not None


def call_of_object(text: str) -> tuple[str, str]:
    """The name and the arguments of a call that is an object. Raises NoCall."""
    try:
        call = bounded_json.loads(text)
        arguments = call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = bounded_json.loads(arguments or "null")
    except ValueError:
        raise NoCall from None
    if not isinstance(call.get("name"), str) or not isinstance(arguments, dict | None):
        raise NoCall
    # Models write none in several ways.
    return call["name"], json.dumps(arguments or {})


def calls_of_python(text: str, known: Collection[str] | None) -> list[tuple[str, str]]:
    """The names and the arguments of calls in a list. `known`: names; None: any. Raises NoCall."""
    try:
        tree = _parsed(text)
        if not isinstance(tree, ast.List) or not 0 < len(tree.elts) <= MAX_CALLS:
            raise NoCall
        calls = []
        for node in tree.elts:
            if not isinstance(node, ast.Call) or node.args:
                raise NoCall
            name = ast.unparse(node.func)
            if not is_name(name) or (known is not None and name not in known):
                raise NoCall
            values = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
            if len(values) != len(node.keywords):
                raise NoCall
            calls.append((name, json.dumps(values, allow_nan=False)))
    except _PYTHON_ERRORS:
        raise NoCall from None
    return calls


def _parsed(text: str) -> ast.expr:
    """An expression in Python. Raises one of _PYTHON_ERRORS."""
    short = _PYTHON_TEXT.sub(r"\1'", text, count=_MAX_PYTHON_MARKS + 1)
    if len(re.sub(r"\w", "", short)) > _MAX_PYTHON_MARKS or _FORMATTED.search(short):
        raise ValueError
    with warnings.catch_warnings():
        # Warnings about escapes that Python does not know.
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def object_of_bare_keys(text: str, mark: str) -> str:
    """An object with bare keys as JSON. `mark`: what is before and after each text. Raises NoCall."""
    parts = text.split(mark)
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    try:
        found = bounded_json.loads("".join(parts))
    except ValueError:
        raise NoCall from None
    if not isinstance(found, dict):
        raise NoCall
    return json.dumps(found)


def typed_value(text: str, schema: Mapping[str, Any], key: str) -> str:
    """The value of a parameter as JSON: what its schema says, a text otherwise."""
    # Qwen3-Coder writes each value on lines of its own. Others do not: a newline at the end is the value's.
    if len(text) > 1 and text[0] == text[-1] == "\n":
        text = text[1:-1]
    properties = schema.get("properties")
    kinds = _kinds_of(properties.get(key) if isinstance(properties, dict) else None)
    try:
        bare = text.strip()
        value = _PYTHON_VALUES[bare] if bare in _PYTHON_VALUES else bounded_json.loads(text)
    except ValueError:
        return (_python_value(text) if kinds & {"array", "object"} else None) or json.dumps(text)
    # Where it may be a text, only what the schema names is another value: a postcode of digits is a text.
    is_text = "string" in kinds and kinds.isdisjoint(_KINDS[type(value)])
    return json.dumps(text if is_text else value)


def _python_value(text: str) -> str | None:
    """A list or an object as Python writes it, and the template of Seed-OSS, as JSON; None: it is none."""
    try:
        value = ast.literal_eval(_parsed(text.strip()))
        return json.dumps(value, allow_nan=False) if isinstance(value, list | dict) else None
    except _PYTHON_ERRORS:
        return None


def _kinds_of(schema: object) -> set[str]:
    """The types of values that a schema names, or one of its alternatives. Empty: none."""
    schemas = [schema]
    for name in ("anyOf", "oneOf"):
        if isinstance(schema, dict) and isinstance(schema.get(name), list):
            schemas += schema[name]
    given = [each.get("type") for each in schemas if isinstance(each, dict)]
    kinds = [kind for each in given for kind in (each if isinstance(each, list) else [each])]
    return {kind for kind in kinds if isinstance(kind, str)}
