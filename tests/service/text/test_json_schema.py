"""Finished JSON is valid under its schema, as jsonschema says, and no sample comes to a dead end."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from service.text.grammar_process import GrammarServer

END = 256
# Bytes that end strings, objects and lists, and what the names here have.
LIKELY = b'"}],:ab01'
MAX_BYTES = 300
SAMPLES = 6


@pytest.fixture(scope="module")
def server() -> GrammarServer:
    server = GrammarServer()
    tokens = [*map(chr, range(256)), "<end>"]
    reply = server.run(
        json.dumps({"method": "set_vocabulary", "special_ids": [END], "tokens": tokens}).encode()
    )
    assert json.loads(reply) == {}
    return server


class Refused(Exception):
    pass


class Failed(Exception):
    """The sample ended with an error."""


def task(server: GrammarServer, **request: Any) -> tuple[dict[str, Any], bytes]:
    line, _, mask = server.run(json.dumps(request).encode()).partition(b"\n")
    return json.loads(line), mask


def compile_schema(server: GrammarServer, schema: Any) -> None:
    reply, _ = task(server, method="compile", kind="json_schema", text=json.dumps(schema))
    if "error" in reply:
        raise Refused(reply["error"])


class Writer:
    """Writes one sample byte by byte."""

    number = 0

    def __init__(self, server: GrammarServer, schema: Any) -> None:
        Writer.number += 1
        self._server, self._number = server, Writer.number
        self._grammar = {"kind": "json_schema", "text": json.dumps(schema)}
        self._num_known = 0
        self.text = b""

    def follow(self) -> tuple[bool, list[int]]:
        """Whether the text may end here, and the bytes that may follow."""
        new = list(self.text[self._num_known :])
        sample = {"sample": self._number, "begin": self._num_known, "token_ids": new}
        sample |= {"draft": [], "draft_tokens": 0}
        reply, mask = task(
            self._server, method="mask", **sample, **({} if self._num_known else self._grammar)
        )
        if "error" in reply:
            raise Failed(reply, self.text)
        self._num_known = len(self.text)
        allowed = [byte for byte in range(256) if mask and mask[byte >> 3] >> (byte & 7) & 1]
        (may_end,) = reply["may_end"]
        assert allowed or may_end, (self.text, "a dead end")
        return may_end, allowed

    def write(self, text: str) -> bool:
        """Appends a text if the grammar allows it. Returns whether it does and the text may then end."""
        for byte in text.encode():
            if byte not in self.follow()[1]:
                return False
            self.text += bytes([byte])
        return self.follow()[0]

    def write_anything(self, rng: random.Random) -> bytes | None:
        """Writes random bytes to an end. None: there is none in sight."""
        while len(self.text) < MAX_BYTES:
            may_end, allowed = self.follow()
            if may_end and (not allowed or rng.random() < 0.5):
                return self.text
            plain = [byte for byte in allowed if 32 <= byte < 127] or allowed
            likely = [byte for byte in plain if byte in LIKELY]
            self.text += bytes([rng.choice(likely if likely and rng.random() < 0.6 else plain)])
        return None


def allows(server: GrammarServer, schema: Any, text: str) -> bool:
    return Writer(server, schema).write(text)


def check_samples(
    server: GrammarServer,
    schema: Mapping[str, Any],
    seed: int,
    samples: int = SAMPLES,
    *,
    may_fail: bool = False,
) -> None:
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    for index in range(samples):
        try:
            text = Writer(server, schema).write_anything(random.Random(f"{seed} {index}"))
        except Failed:
            assert may_fail
            continue
        if text is not None:
            assert validator.is_valid(json.loads(text)), (schema, text)


# Small values, so that bounds meet. No 0.1: jsonschema's multiples are by floats, and ours by digits.
NUMBERS = st.sampled_from([-3, -2.5, -2, -1, -0.5, 0, 0.25, 1, 1.5, 2, 2.75, 3, 10, 100])
NAMES = st.sampled_from(["a", "b", "ab", ""])
# Of names without end: where all that a pattern matches are declared, a sample comes to a dead end.
PATTERNS = st.sampled_from(["^a", "b$", "x", ".*", "^.*$", "[^a]", ".", "^.$"])


def optional(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def typed(name: str, keywords: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return keywords.map(lambda given: {"type": name, **given})


BOUNDS = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), NUMBERS)
STEPS = st.sampled_from([1, 2, 0.5, 0.25, 3])
LEAVES = st.one_of(
    typed("number", optional(**BOUNDS)),
    typed("number", optional(**BOUNDS, multipleOf=STEPS)),
    typed("integer", optional(**BOUNDS, multipleOf=STEPS)),
    typed(
        "string",
        optional(
            minLength=st.integers(0, 3),
            maxLength=st.integers(0, 4),
            pattern=st.sampled_from(["^a+$", "b", "^[ab]{2,3}$", "a|b$", "^$", "^a", "^(a|b)"]),
            format=st.sampled_from(["date", "ipv4", "color", "int32"]),
        ),
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {}, {"$ref": "#/$defs/d"}]),
    st.sampled_from([1, 1.5, "a", None, [1, "a"], {"a": 1}, "", '"\\']).map(lambda value: {"const": value}),
    st.lists(
        st.sampled_from([1, "a", "ab", None, False, [], 2.5]), min_size=1, max_size=3, unique_by=repr
    ).map(lambda values: {"enum": values}),
)


def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = inner | st.booleans()
    objects = optional(
        properties=st.dictionaries(NAMES, some, max_size=3),
        patternProperties=st.dictionaries(PATTERNS, some, min_size=1, max_size=2),
        additionalProperties=some,
        required=st.lists(NAMES | st.just("c"), max_size=2, unique=True),
    )
    # Beside names that need not be there, the library leaves these bounds out.
    counted = optional(
        additionalProperties=some,
        required=st.lists(NAMES, max_size=2, unique=True),
        minProperties=st.integers(0, 2),
        maxProperties=st.integers(0, 3),
    )
    arrays = optional(
        items=some,
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=st.integers(0, 2),
        maxItems=st.integers(0, 3),
    )
    schemas = st.lists(inner, min_size=1, max_size=2)
    several = st.sampled_from(["anyOf", "allOf"])
    return st.one_of(
        typed("object", objects),
        typed("object", counted),
        typed("array", arrays),
        st.tuples(several, schemas).map(lambda pair: {pair[0]: pair[1]}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    )


def extended_further(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """With what the grammar does not know or leaves out."""
    objects = optional(
        properties=st.dictionaries(NAMES, inner | st.booleans(), max_size=3),
        patternProperties=st.dictionaries(PATTERNS | st.just("^a$"), inner, max_size=2),
        required=st.lists(NAMES, max_size=2, unique=True),
        minProperties=st.integers(0, 3),
        maxProperties=st.integers(0, 3),
        propertyNames=inner,
        dependentSchemas=st.dictionaries(NAMES, inner, max_size=2),
    )
    schemas = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        extended(inner),
        typed("object", objects),
        typed("array", optional(items=inner, contains=inner, uniqueItems=st.booleans())),
        schemas.map(lambda several: {"oneOf": several}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], "not": pair[1]}),
        st.tuples(*[inner] * 3).map(lambda three: dict(zip(("if", "then", "else"), three, strict=True))),
    )


SCHEMAS = st.recursive(LEAVES, extended, max_leaves=5)
FURTHER_SCHEMAS = st.recursive(LEAVES, extended_further, max_leaves=5)
INNER = LEAVES.filter(lambda leaf: "$ref" not in leaf)


@pytest.mark.parametrize(
    ("schemas", "may_fail"), [(SCHEMAS, False), (FURTHER_SCHEMAS, True)], ids=["known", "further"]
)
@given(data=st.data(), inner=INNER, seed=st.integers(0, 1 << 20))
def test_every_finished_sample_is_valid(
    server: GrammarServer,
    schemas: st.SearchStrategy[dict[str, Any]],
    may_fail: bool,
    data: st.DataObject,
    inner: dict[str, Any],
    seed: int,
) -> None:
    """Of what the grammar does not know or leaves out, a sample that ends by itself; others may fail."""
    whole = {**data.draw(schemas), "$defs": {"d": inner}}
    try:
        compile_schema(server, whole)
    except Refused:
        return
    check_samples(server, whole, seed, 3, may_fail=may_fail)


DRAFT = "https://json-schema.org/draft/2020-12/schema"
OBJECT = {"type": "object", "additionalProperties": False}
A = {"a": {"type": "integer"}}
SERVED: list[dict[str, Any]] = [
    # Numbers beside an exclusive bound.
    {"type": "number", "minimum": -2.5, "exclusiveMaximum": -2},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 0.25},
    {"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
    {"allOf": [{"type": "number", "minimum": -2.5}, {"exclusiveMaximum": -2}]},
    {"type": "array", "items": {"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, "minItems": 2},
    {"type": "number", "exclusiveMinimum": 2, "maximum": 3, "multipleOf": 0.5},
    # A declared name in escapes is no additional one.
    {"type": "object", "properties": A, "additionalProperties": {"type": "null"}, "required": ["a"]},
    {"type": "object", "patternProperties": {"^a": {"const": 1}}, "additionalProperties": {"type": "null"}},
    {"type": "object", "required": ["a"], "minProperties": 2},
    # Bounds of whole numbers and floats of a size: the library has floats, and integers of 64 bits.
    {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    {"type": ["integer", "null"], "maximum": 2**64 - 1, "minimum": 0},
    {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
    {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 4},
    # Keywords that the library does not know, where they say nothing.
    {"type": "array", "uniqueItems": False, "unevaluatedItems": True, "not": False},
    {
        "type": "object",
        "propertyNames": {"type": "string"},
        "dependentRequired": {},
        "unevaluatedProperties": {},
    },
    {"type": "array", "items": {"type": "string", "minLength": 1.0}, "minItems": 1.0, "maxItems": 2.0},
    {"$ref": "#whole", "$defs": {"whole": {"$anchor": "whole", "type": "integer"}}},
    # Alternatives without a value in common, behind references or listed.
    {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": OBJECT}},
    {"oneOf": [{"const": 1}, {"const": 2}, {"const": "a"}]},
    {
        "items": {"oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"type": "null"}]},
        "$defs": {name: {**OBJECT, "properties": {"t": {"const": name}}, "required": ["t"]} for name in "xy"},
    },
    # Names that are no part of a URI, and what counts only beside a list of items.
    {"items": {"$ref": "#/$defs/List<\u540d>"}, "$defs": {"List<\u540d>": {"type": "integer"}}},
    {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False, "minItems": 1},
    {**OBJECT, "properties": A, "patternProperties": {"^x": A["a"]}, "required": ["a", "xx"]},
    # Recursive, with an end.
    {**OBJECT, "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#"}},
    {"$schema": "https://json-schema.org/draft-07/schema#", "type": "integer"},
    # Of drafts before 2020-12, without saying so.
    {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
]


@pytest.mark.parametrize("schema", SERVED, ids=range(len(SERVED)))
def test_what_the_library_alone_gets_wrong(server: GrammarServer, schema: dict[str, Any]) -> None:
    compile_schema(server, schema)
    if isinstance(schema.get("items"), list):
        schema = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    check_samples(server, schema, 0, 12)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "minimum": -2.5, "exclusiveMaximum": -2}, "-2.25", "-2"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.25}, "0.25", "0"),
        ({"type": "number", "multipleOf": 0.1}, "0.3", "0.35"),
        ({"type": "integer", "exclusiveMinimum": 2}, "3", "2"),
        ({"type": "object", "properties": A}, '{"a":1,"b":null}', '{"\\u0061":null}'),
        ({"type": "string", "format": "color"}, '"x"', "1"),
        ({"type": "string", "format": "date"}, '"2026-11-28"', '"x"'),
        ({"type": "integer", "format": "int32"}, "3", '"x"'),
        ({"type": "string", "format": None, "title": None}, '"x"', "1"),
        ({"properties": A, "description": "\u001b"}, '{"a":1}', '{"\\u0061":null}'),
        ({"patternProperties": {"^\\p{L}+$": {"type": "null"}}}, '{"\u00e9":null}', '{"\u00e9":1}'),
        ({"type": "string", "pattern": "\\\\"}, '"\\\\"', '"a"'),
    ],
)
def test_what_is_written(server: GrammarServer, schema: dict[str, Any], valid: str, invalid: str) -> None:
    compile_schema(server, schema)
    assert allows(server, schema, valid)
    assert not allows(server, schema, invalid)


def test_a_finished_value_that_is_not_valid_is_an_error_and_no_end(
    server: GrammarServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what is wrong in another way than those known: here, with the library's own bounds."""
    monkeypatch.setattr("service.text.json_schema._set_bounds", lambda _: None)
    schema = {"type": "number", "minimum": -2.5, "exclusiveMaximum": -2, "title": "not prepared"}
    top = Writer(server, schema)
    assert not top.write("-2"), "it may not end here"
    assert top.write(".25")
    inner = {"type": "array", "items": schema}
    with pytest.raises(Failed, match="finished and not valid"):
        Writer(server, inner).write("[-2]")


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "array", "uniqueItems": True}, "[1,2]", "[1,1]"),
        ({"not": {"type": "string"}}, "null", '"a"'),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, '"ab"', '"a"'),
        ({"type": "array", "contains": {"type": "integer"}}, '["a",1]', '["a"]'),
    ],
)
def test_what_the_library_does_not_know_is_checked_at_the_end(
    server: GrammarServer, schema: dict[str, Any], valid: str, invalid: str
) -> None:
    assert allows(server, schema, valid)
    with pytest.raises(Failed, match="finished and not valid"):
        allows(server, schema, invalid)


def test_a_value_of_several_schemas_of_a_oneof_is_no_end(server: GrammarServer) -> None:
    numbers = Writer(server, {"oneOf": [{"type": "integer"}, {"type": "number"}]})
    assert not numbers.write("1")
    assert numbers.write(".5")
    objects = {"oneOf": [{**OBJECT, "properties": {"t": {"const": name}}} for name in "xy"]}
    assert allows(server, objects, '{"t":"x"}')
    with pytest.raises(Failed, match="finished and not valid"):
        Writer(server, objects).write("{}")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "frob"}, "no JSON Schema, at 'type'"),
        ({"properties": {"description": 5}}, "no JSON Schema, at 'properties/description'"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"items": {"unevaluatedProperties": False}}, "unevaluatedProperties and"),
        ({"$schema": 3}, r"at '\$schema'"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "draft 3"),
        ({"type": "string", "pattern": "a\\"}, "lone backslash"),
        ({"propertyNames": {"pattern": "a\\"}}, "lone backslash"),
        ({"dependentSchemas": {"const": {"patternProperties": {"a\\": {}}}}}, "lone backslash"),
        ({"contains": {"pattern": "(?=a)"}}, "look-around"),
        ({"not": {"pattern": "("}}, "regex parse error"),
        # Its second alternative is no expression, the first one matches nothing.
        ({"not": {"anyOf": [{"pattern": r"[^\s\S]"}, {"pattern": "("}]}}, "regex parse error"),
        ({"dependentSchemas": {"title": 5}, "$schema": DRAFT}, "at 'dependentSchemas/title'"),
        ({"$schema": "https://example.org/own", "type": "integer"}, "does not fetch"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    server: GrammarServer, schema: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Refused, match=reason):
        compile_schema(server, schema)


CLOSED = {"unevaluatedProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        *({keyword: CLOSED} for keyword in ("not", "if", "then", "else", "contains", "propertyNames")),
        *({keyword: {"a": CLOSED}} for keyword in ("dependentSchemas", "dependencies", "properties")),
        {"not": {"properties": {"const": {"unevaluatedItems": {"type": "null"}}}}},
        {"$ref": "#/components/a", "components": {"a": CLOSED}},
    ],
    ids=str,
)
def test_what_is_not_evaluated_is_refused_wherever_it_is(
    server: GrammarServer, schema: dict[str, Any]
) -> None:
    with pytest.raises(Refused, match="unevaluatedProperties and"):
        compile_schema(server, schema)


def test_values_in_a_schema_are_no_schemas(server: GrammarServer) -> None:
    for schema in ({"const": CLOSED}, {"enum": [CLOSED]}):
        assert allows(server, schema, json.dumps(CLOSED))
    annotated = {"type": "integer", "default": {"pattern": "a\\"}, "examples": [CLOSED]}
    assert allows(server, annotated, "1")
    with pytest.raises(Failed, match="unevaluatedProperties and"):
        allows(server, {"not": {"$ref": "#/default"}, "default": CLOSED}, "{}")


def test_a_reference_that_leads_back_to_itself_has_no_value(server: GrammarServer) -> None:
    """Followed without end, it ended the process that computes the masks of all."""
    assert not allows(server, {"$ref": "#"}, "null")
    for name in ("$ref", "$dynamicRef"):
        assert allows(server, {"anyOf": [{name: "#"}, {"type": "null"}]}, "null")


def test_what_a_draft_leads_to_is_no_error_of_the_sample(server: GrammarServer) -> None:
    schema = {"type": "integer", "if": {"minimum": 10}, "then": {"$ref": "#/x-a"}, "x-a": 5}
    compile_schema(server, schema)
    grammar = {"kind": "json_schema", "text": json.dumps(schema)}
    sample = {"sample": 0, "begin": 0, "token_ids": [ord("1")], "draft": [ord("2")], "draft_tokens": 1}
    reply, _ = task(server, method="mask", **grammar, **sample)
    assert reply == {"draft": [], "may_end": [True]}


def behind(keyword: str, last: Any) -> dict[str, Any]:
    """A schema that there are 2^40 ways to, all of them through few others."""
    return {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} if n < 40 else last for n in range(41)}


@pytest.mark.parametrize("keyword", ["allOf", "anyOf"])
def test_a_value_is_checked_once_by_a_schema_behind_many_references(
    server: GrammarServer, keyword: str
) -> None:
    """One caller's schema took minutes, in the process that computes the masks of all."""
    is_string = {"type": "string"}
    schema = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "integer"}], "$defs": behind(keyword, is_string)}
    compile_schema(server, schema)
    assert allows(server, schema, "1")
    assert allows(server, schema, '"a"')
    assert not allows(server, schema, "true")
