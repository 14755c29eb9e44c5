"""Validates finished values against a JSON Schema. Runs in the process for grammars."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias, TypeGuard

from service.text.schema_patterns import SchemaError, check_patterns, matches

Schema: TypeAlias = dict[str, Any]
_Keyword: TypeAlias = Callable[..., Iterator[Exception]]
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# Keywords that contain schemas by name.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# Keywords that contain JSON values.
_VALUES = ("const", "enum", "default", "examples")
ANNOTATIONS = frozenset(
    {
        "$comment", "contentEncoding", "contentMediaType", "default", "deprecated", "description", "examples",
        "format", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a finite number in JSON."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


class Validator:
    """Checks whether values are valid under a schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises SchemaError for an invalid schema, or one that cannot be checked."""
        # It takes 0.1 s to import, and most processes need no schemas.
        from jsonschema import (  # noqa: PLC0415
            Draft3Validator,
            Draft4Validator,
            Draft7Validator,
            Draft202012Validator,
        )
        from jsonschema.validators import extend, validator_for  # noqa: PLC0415
        from referencing import Registry  # noqa: PLC0415

        drafts: list[Any] = [Draft202012Validator, Draft7Validator, Draft4Validator]
        if isinstance(schema.get("$schema"), str):
            drafts = [validator_for(schema, default=Draft202012Validator)]
        if drafts[0] is Draft3Validator:
            raise SchemaError("draft 3 of JSON Schema is not supported")
        faults = [_fault(draft, schema) for draft in drafts]
        if None not in faults:
            raise SchemaError(f"it is no JSON Schema, at '{faults[0]}'")
        _check_applicable(schema)
        draft = drafts[faults.index(None)]
        # By the ids of the function that follows a reference, the schema with it, and the value, which all
        # outlive a check.
        self._is_invalid: dict[tuple[int, int, int], bool] = {}
        follow = {name: draft.VALIDATORS[name] for name in _REFERENCES if name in draft.VALIDATORS}
        keywords = _KEYWORDS | {name: partial(self._reference, each) for name, each in follow.items()}
        # Without an explicit registry, remote references would be fetched.
        self._validator = extend(draft, keywords)(schema, registry=Registry())

    def accepts(self, text: bytes | bytearray) -> bool:
        """Whether a text is the JSON of a valid value. Raises SchemaError."""
        from referencing.exceptions import Unresolvable  # noqa: PLC0415

        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except ValueError:
            return False
        except (ArithmeticError, AttributeError, LookupError, TypeError, Unresolvable):
            # jsonschema does not check references before it follows them.
            raise SchemaError("a reference leads to what is no schema") from None
        finally:
            self._is_invalid.clear()

    def _reference(
        self, follow: _Keyword, validator: Any, reference: Any, value: Any, schema: Schema
    ) -> Iterator[Exception]:
        """Follows each reference once for each value: there may be 2^64 paths to it."""
        key = id(follow), id(schema), id(value)
        if key not in self._is_invalid:
            # The result while it is followed: a reference that only leads back to itself has no valid value.
            self._is_invalid[key] = True
            errors = follow(validator, reference, value, schema)
            self._is_invalid[key] = next(iter(errors), None) is not None
        return _errors(self._is_invalid[key])


def _fault(draft: Any, schema: Schema) -> str | None:
    """Where a schema is invalid in this draft. Null annotations, which some programs write, are allowed."""
    for error in draft(draft.META_SCHEMA).iter_errors(schema):
        place = list(map(str, error.absolute_path))
        if not place or place[-1] not in ANNOTATIONS or place[-2:-1] in [[name] for name in _NAMED]:
            return "/".join(place)
    return None


def _check_applicable(schema: Schema) -> None:
    """Raises SchemaError for keywords that cannot be checked."""
    patterns = []
    for each in _schemas(schema):
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            _check_unevaluated(each.get(name, True))
        named = each.get("patternProperties")
        patterns += [each.get("pattern"), *(named if isinstance(named, dict) else ())]
    check_patterns([pattern for pattern in patterns if isinstance(pattern, str)])


def _schemas(value: Any) -> Iterator[Schema]:
    """All subschemas of a schema, also below unknown keywords, since references may lead there."""
    if isinstance(value, list):
        for each in value:
            yield from _schemas(each)
    elif isinstance(value, dict):
        yield value
        for name, inner in value.items():
            if name not in _VALUES:
                is_named = name in _NAMED and isinstance(inner, dict)
                yield from _schemas(list(inner.values()) if is_named else inner)


def _check_unevaluated(inner: Any) -> None:
    """Raises SchemaError for `unevaluated...`, for which jsonschema would follow references without end."""
    if inner not in (True, {}):
        raise SchemaError("unevaluatedProperties and unevaluatedItems are not supported")


def _errors(is_invalid: bool) -> Iterator[Exception]:
    from jsonschema import ValidationError  # noqa: PLC0415

    if is_invalid:
        yield ValidationError("")


def _multiple_of(_validator: Any, step: float, value: Any, _schema: Schema) -> Iterator[Exception]:
    """Compares decimal digits, so that 0.3 is a multiple of 0.1."""
    return _errors(is_number(value) and Fraction(repr(value)) % Fraction(repr(step)) != 0)


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Schema) -> Iterator[Exception]:
    return _errors(isinstance(value, str) and not matches(pattern, value))


def _pattern_properties(validator: Any, patterns: Schema, value: Any, _schema: Schema) -> Iterator[Exception]:
    for pattern, inner in patterns.items():
        for name, each in value.items() if isinstance(value, dict) else ():
            if matches(pattern, name):
                yield from validator.descend(each, inner)


def _additional_properties(validator: Any, inner: Any, value: Any, schema: Schema) -> Iterator[Exception]:
    for name, each in value.items() if isinstance(value, dict) else ():
        declared = name in schema.get("properties", ())
        if not declared and not any(matches(each, name) for each in schema.get("patternProperties", ())):
            yield from validator.descend(each, inner)


def _unevaluated(_validator: Any, inner: Any, _value: Any, _schema: Schema) -> Iterator[Exception]:
    _check_unevaluated(inner)
    return _errors(False)


def _unique_items(_validator: Any, is_unique: bool, value: Any, _schema: Schema) -> Iterator[Exception]:
    """Takes linear time: jsonschema compares each item with all others."""
    if not is_unique or not isinstance(value, list):
        return _errors(False)
    return _errors(len({json.dumps(_exact(each), sort_keys=True) for each in value}) < len(value))


def _exact(value: Any) -> Any:
    """A value in which equal numbers have one form: 1.0 becomes 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return list(map(_exact, value))
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items()}
    return value


# Keywords that jsonschema checks differently from the grammar, or too slowly. Python's regular expressions
# differ from those of JSON Schema more than the library's do.
_KEYWORDS: dict[str, _Keyword] = {
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    # Schemas with these are refused before, unless a reference leads into a `default`.
    "unevaluatedProperties": _unevaluated,
    "unevaluatedItems": _unevaluated,
}
