"""Rewrites JSON Schemas to avoid llguidance's errors. Runs in the process for grammars.

`prepared` rewrites a schema so that the library's grammar allows only valid values, or refuses it if that is
impossible. For example, the library ignores an integer exclusive bound beside an inclusive one. For the rest,
`schema_values` checks finished values: the library treats `oneOf` as `anyOf`, rounds numbers, and ignores
unknown keywords. It refuses schemas that it cannot check.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any
from urllib.parse import quote

from service.text.schema_patterns import SchemaError
from service.text.schema_values import Schema, is_number

# The library's keywords that contain schemas: one, a list of them, or several by name.
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# The least distance from an exclusive bound: a smaller one would need an expression of hundreds of digits.
_LEAST_DISTANCE = 1e-15
# From here on every float is an integer.
_LARGE = 2.0**53
# The largest bound that the library can apply: the last float of 64 bits with a sign.
_LARGEST_BOUND = 2**63 - 1024
# Characters of a reference besides letters and digits. Programs put type names into them without escaping.
_URI = "-._~:/?@!$&'()*+,;=%"


def prepared(schema: Any) -> Any:
    """A copy of a schema that the library applies correctly. Raises SchemaError."""
    if not isinstance(schema, dict):
        return schema
    written = dict(schema)
    _prepare_inner(written)
    if not isinstance(schema.get("items"), list):
        # It only has a meaning beside a list, and with it the library ignores `prefixItems`.
        written.pop("additionalItems", None)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        written["$ref"] = "#" + quote(reference[1:], safe=_URI)
    if schema.get("format", "") is None:
        del written["format"]
    written |= {name: int(written[name]) for name in _COUNTS if is_number(written.get(name))}
    _set_bounds(written)
    required = schema.get("required")
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least > len(required if isinstance(required, list) else ()) + 1:
        # The grammar counts a repeated name several times.
        raise SchemaError("minProperties can be at most one more than the number of required names")
    return written


def _prepare_inner(schema: Schema) -> None:
    for name in _NAMED:
        if isinstance(schema.get(name), dict):
            schema[name] = {key: prepared(inner) for key, inner in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            schema[name] = list(map(prepared, schema[name]))
    schema |= {name: prepared(schema[name]) for name in _ONE if name in schema}


def _set_bounds(schema: Schema) -> None:
    """Replaces exclusive bounds by the nearest inclusive ones, and bounds that the library cannot hold."""
    for name, sign in (("minimum", 1), ("maximum", -1)):
        if is_number(schema.get(name)):
            schema[name] = _inside(schema[name], sign)
    if schema.get("type") == "integer":
        return
    for exclusive, inclusive, sign, nearer in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive)
        if is_number(bound) and abs(bound) < _LARGE:
            del schema[exclusive]
            beside = _next(bound, sign, schema.get("multipleOf"))
            schema[inclusive] = nearer(beside, other) if is_number(other) else beside


def _inside(bound: float, sign: int) -> float:
    """The nearest number inside a bound that the library can hold. `sign`: 1 for a lower bound, else -1."""
    if abs(bound) <= _LARGE:
        return bound
    near = sign * float(max(sign * bound, -_LARGEST_BOUND))
    # Python compares an integer and a float by their values, and subtracts them as floats.
    is_inside = near >= bound if sign > 0 else near <= bound
    return int(near if is_inside else math.nextafter(near, sign * math.inf))


def _next(bound: float, sign: int, step: Any) -> float:
    """The nearest multiple of a step beyond a bound. `sign`: 1 for larger numbers, -1 for smaller ones."""
    if not is_number(step) or not step > 0:
        return bound + sign * max(math.ulp(bound), _LEAST_DISTANCE)
    size = Fraction(repr(step))
    multiple = (math.floor(sign * Fraction(repr(bound)) / size) + 1) * sign * size
    return int(multiple) if multiple.denominator == 1 else float(multiple)
