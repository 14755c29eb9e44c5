"""Where the references of a JSON Schema lead, and which schemas have no value in common.

Runs in the process for grammars.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from service.text.schema_patterns import SchemaError
from service.text.schema_values import Schema

# Keywords with schemas for the same value.
COMBINED = ("allOf", "anyOf", "oneOf")
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_PYTHON = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is certain of the values of a schema: their types, and which they are if it lists them.

    `names`: of objects, the names that are required. `listed`: the values of some of their properties.
    Values are JSON.
    """

    types: frozenset[str]
    values: frozenset[str] | None
    names: frozenset[str]
    listed: Schema

    def are_apart(self, other: _Facts) -> bool:
        """Whether it is certain that no value is valid under both."""
        common = self.types & other.types
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        names = self.names & other.names & self.listed.keys() & other.listed.keys()
        return not common or (
            common == {"object"} and any(self.listed[name].isdisjoint(other.listed[name]) for name in names)
        )


class References:
    """What a whole schema refers to. Each part of it is looked at once, however many refer to it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # By identity, which a part has as long as the root has it.
        self._facts: dict[int, _Facts] = {}

    def check(self) -> None:
        """Raises SchemaError for a reference that only leads back to itself: the library begins its value."""
        self._check_inside(self._root, set())

    def grouped(self, schemas: list[Any]) -> Schema:
        """What stands for a `oneOf`: only schemas that may have a value in common must be told apart."""
        facts = [self._facts_of(schema) for schema in schemas]
        values = [each.values for each in facts if each.values is not None]
        if len(values) == len(schemas) and len(frozenset[str]().union(*values)) == sum(map(len, values)):
            return {"anyOf": schemas}
        groups: list[list[int]] = []
        for index, each in enumerate(facts):
            near = [group for group in groups if not all(each.are_apart(facts[other]) for other in group)]
            groups = [group for group in groups if group not in near]
            groups.append([*itertools.chain(*near), index])
        if len(groups) == 1:
            return {"oneOf": schemas}
        found = [[schemas[index] for index in group] for group in groups]
        return {"anyOf": [group[0] if len(group) == 1 else {"oneOf": group} for group in found]}

    def _check_inside(self, schema: Any, ends: set[int]) -> None:
        """`ends`: as in `_check_place`."""
        if isinstance(schema, list):
            for inner in schema:
                self._check_inside(inner, ends)
        if not isinstance(schema, dict):
            return
        self._check_place(schema, frozenset(), ends)
        for inner in schema.values():
            self._check_inside(inner, ends)

    def _check_place(self, schema: Any, path: frozenset[int], ends: set[int]) -> None:
        """Follows what applies to the same value as a schema does.

        `path`: the schemas on the way. `ends`: those that lead to no loop, which this adds to.
        """
        if not isinstance(schema, dict) or id(schema) in ends:
            return
        if id(schema) in path:
            raise SchemaError("a reference leads back to itself")
        places = [self._target(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        for name in COMBINED:
            if isinstance(schema.get(name), list):
                places += schema[name]
        for place in places:
            self._check_place(place, path | {id(schema)}, ends)
        ends.add(id(schema))

    def _facts_of(self, schema: Any) -> _Facts:
        if not isinstance(schema, dict):
            return _Facts(_TYPES if schema is not False else frozenset(), None, frozenset(), {})
        known = self._facts.get(id(schema))
        if known is None:
            known = self._facts[id(schema)] = self._new_facts(schema)
        return known

    def _new_facts(self, schema: Schema) -> _Facts:
        given = schema.get("type", list(_TYPES))
        types = frozenset([given] if isinstance(given, str) else given)
        if "number" in types:
            types |= {"integer"}
        values = _values(schema)
        names: frozenset[str] = frozenset(schema.get("required", ()))
        properties = schema.get("properties", {}).items()
        listed = {name: found for name, inner in properties if (found := _values(inner)) is not None}
        target = self._target(schema["$ref"]) if isinstance(schema.get("$ref"), str) else True
        for each in (target, *schema.get("allOf", ())):
            inner = self._facts_of(each)
            types, names, listed = types & inner.types, names | inner.names, inner.listed | listed
            values = inner.values if values is None else values
        for name in ("anyOf", "oneOf"):
            if name in schema:
                types &= frozenset[str]().union(*(self._facts_of(each).types for each in schema[name]))
        if values is not None:
            types &= {name for value in values for name in _types_of(json.loads(value))}
        return _Facts(types, values, names, listed)

    def _target(self, reference: str) -> Any:
        """What a reference in the schema names; None: it may be a schema elsewhere, or a name for one."""
        if reference != "#" and not reference.startswith("#/"):
            return None
        at: Any = self._root
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list):
                at = dict(zip(map(str, range(len(at))), at, strict=True))
            at = at.get(name) if isinstance(at, dict) else None
        return at


def _values(schema: Any) -> frozenset[str] | None:
    """The values that a schema lists, as JSON; None: it lists none."""
    if not isinstance(schema, dict) or not {"const", "enum"} & schema.keys():
        return None
    return frozenset(map(_text, [schema["const"]] if "const" in schema else schema["enum"]))


def _text(value: Any) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return json.dumps(int(value) if whole else value, sort_keys=True)


def _types_of(value: Any) -> tuple[str, ...]:
    name = _PYTHON.get(type(value))
    return ("integer", "number") if name is None else (name,)
