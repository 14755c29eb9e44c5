"""JSON Schemas for llguidance, without what it gets wrong. Runs in the process for grammars.

`prepared` writes a schema such that the library's grammar allows only valid values, or refuses it where the
library cannot: it ignores an exclusive bound that is an integer beside the other bound. `schema_values`
checks finished values, for what is left: the library takes a `oneOf` as an `anyOf`, rounds numbers, and
leaves out what it does not know. It refuses what it cannot check.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any
from urllib.parse import quote

from service.text.schema_patterns import SchemaError
from service.text.schema_values import Schema, is_number

# Where schemas have schemas that the library knows: one, a list of them, or some by name.
_ONE = ("items", "additionalItems", "additionalProperties")
_LISTS = ("items", "prefixItems", "allOf", "anyOf", "oneOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
# The least distance from an exclusive bound: a smaller one takes an expression of hundreds of digits.
_LEAST_DISTANCE = 1e-15
# From here on every float is an integer.
_LARGE = 2.0**53
# The largest bound that the library can apply: the last float of 64 bits with a sign.
_LARGEST_BOUND = 2**63 - 1024
# Characters of a reference beside letters and digits: programs write the names of types as they are.
_URI = "-._~:/?@!$&'()*+,;=%"


def prepared(schema: Any) -> Any:
    """A schema as the library can apply it. `schema` is not changed. Raises SchemaError."""
    if not isinstance(schema, dict):
        return schema
    written = dict(schema)
    _prepare_inner(written)
    if not isinstance(schema.get("items"), list):
        # Only beside a list it counts, and the library ignores `prefixItems` where there is one.
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
        # The grammar counts a name as often as it is written.
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
    """Replaces exclusive bounds by inclusive ones next to them, and large ones by those inside of them."""
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
    """The next number inside of a bound that the library can hold; `sign`: 1 for a lower bound."""
    if abs(bound) <= _LARGE:
        return bound
    near = sign * float(max(sign * bound, -_LARGEST_BOUND))
    # Python compares an integer and a float by their values, and subtracts them as floats.
    is_inside = near >= bound if sign > 0 else near <= bound
    return int(near if is_inside else math.nextafter(near, sign * math.inf))


def _next(bound: float, sign: int, step: Any) -> float:
    """The next number to a bound, of those that are multiples of a step; `sign`: 1 for larger ones."""
    if not is_number(step) or not step > 0:
        return bound + sign * max(math.ulp(bound), _LEAST_DISTANCE)
    size = Fraction(repr(step))
    multiple = (math.floor(sign * Fraction(repr(bound)) / size) + 1) * sign * size
    return int(multiple) if multiple.denominator == 1 else float(multiple)
