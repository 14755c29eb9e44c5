"""Finished values are valid as JSON Schema has it, where jsonschema alone is wrong, slow or fails."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.text.schema_patterns import SchemaError
from service.text.schema_values import Validator


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("[[1],[true],[1]]", False),
        ("[[1],[true],1,true,null,0,false]", True),
        ("[1,1.0]", False),
        ("[-0.0,0]", False),
        ('[{"a":[1],"b":2},{"b":2.0,"a":[1.0]}]', False),
        ('["1",1,"[1]",[1]]', True),
        (r'["\u0061","a"]', False),
        ("[9007199254740993,9007199254740992.0]", True),
        # Compared with each other they took minutes.
        (json.dumps([*range(40_000), None, "a"]), True),
    ],
    ids=lambda given: str(given)[:30],
)
def test_unique_items(text: str, is_valid: bool) -> None:
    assert Validator({"uniqueItems": True}).accepts(text.encode()) is is_valid
    assert Validator({"uniqueItems": False}).accepts(text.encode())


@pytest.mark.parametrize("target", ["x", 5, {"required": 5}, {"properties": [1]}, None], ids=str)
def test_a_reference_to_no_schema_is_an_error(target: Any) -> None:
    """It ended the process that computes the masks of all."""
    schema = {"not": {"$ref": "#/x-a"}} | ({} if target is None else {"x-a": target})
    with pytest.raises(SchemaError, match="leads to what is no schema"):
        Validator(schema).accepts(b'{"a":1}')
