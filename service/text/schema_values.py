"""Whether finished values are valid under a JSON Schema. Runs in the process for grammars."""

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
# Keywords with schemas by name.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
# Keywords with values of JSON.
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
    """Whether values are valid under a schema."""

    def __init__(self, schema: Schema) -> None:
        """Raises SchemaError if it is no schema, or has what cannot be checked."""
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
        # By the identities of what follows a reference, a schema with it, and a value: they outlive a check.
        self._is_invalid: dict[tuple[int, int, int], bool] = {}
        follow = {name: draft.VALIDATORS[name] for name in _REFERENCES if name in draft.VALIDATORS}
        keywords = _KEYWORDS | {name: partial(self._reference, each) for name, each in follow.items()}
        # Without a registry remote references would be fetched.
        self._validator = extend(draft, keywords)(schema, registry=Registry())

    def accepts(self, text: bytes | bytearray) -> bool:
        """Whether a text is JSON of a valid value. Raises SchemaError."""
        from referencing.exceptions import Unresolvable  # noqa: PLC0415

        try:
            return bool(self._validator.is_valid(json.loads(text)))
        except ValueError:
            return False
        except (ArithmeticError, AttributeError, LookupError, TypeError, Unresolvable):
            # An error of jsonschema, which does not check references before it follows them.
            raise SchemaError("a reference leads to what is no schema") from None
        finally:
            self._is_invalid.clear()

    def _reference(
        self, follow: _Keyword, validator: Any, reference: Any, value: Any, schema: Schema
    ) -> Iterator[Exception]:
        """Follows each reference once with each value: there may be 2^64 ways to it."""
        key = id(follow), id(schema), id(value)
        if key not in self._is_invalid:
            # While it is followed: one that only leads back to itself has no value.
            self._is_invalid[key] = True
            errors = follow(validator, reference, value, schema)
            self._is_invalid[key] = next(iter(errors), None) is not None
        return _errors(self._is_invalid[key])


def _fault(draft: Any, schema: Schema) -> str | None:
    """Where a schema is none of this draft. Some programs write null for annotations, which do no harm."""
    for error in draft(draft.META_SCHEMA).iter_errors(schema):
        place = list(map(str, error.absolute_path))
        if not place or place[-1] not in ANNOTATIONS or place[-2:-1] in [[name] for name in _NAMED]:
            return "/".join(place)
    return None


def _check_applicable(schema: Schema) -> None:
    """Raises SchemaError for what cannot be checked."""
    patterns = []
    for each in _schemas(schema):
        for name in ("unevaluatedProperties", "unevaluatedItems"):
            _check_unevaluated(each.get(name, True))
        named = each.get("patternProperties")
        patterns += [each.get("pattern"), *(named if isinstance(named, dict) else ())]
    check_patterns([pattern for pattern in patterns if isinstance(pattern, str)])


def _schemas(value: Any) -> Iterator[Schema]:
    """All that may be schemas in one; also below unknown keywords, where references may lead."""
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
    """Raises SchemaError: to see what is evaluated, jsonschema would follow references without end."""
    if inner not in (True, {}):
        raise SchemaError("unevaluatedProperties and unevaluatedItems are not supported")


def _errors(is_invalid: bool) -> Iterator[Exception]:
    from jsonschema import ValidationError  # noqa: PLC0415

    if is_invalid:
        yield ValidationError("")


def _multiple_of(_validator: Any, step: float, value: Any, _schema: Schema) -> Iterator[Exception]:
    """By the digits: 0.3 is a multiple of 0.1."""
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
    """In a time that grows with the size: jsonschema compares each item with all others."""
    if not is_unique or not isinstance(value, list):
        return _errors(False)
    return _errors(len({json.dumps(_exact(each), sort_keys=True) for each in value}) < len(value))


def _exact(value: Any) -> Any:
    """A value in which equal numbers are written equally: 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return list(map(_exact, value))
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items()}
    return value


# Keywords whose own check differs from the grammar's, or takes too long: Python's regular expressions are
# others than those of JSON Schema, and the library's are nearer to them.
_KEYWORDS: dict[str, _Keyword] = {
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    # Refused at the start, unless a reference leads into a `default`.
    "unevaluatedProperties": _unevaluated,
    "unevaluatedItems": _unevaluated,
}
