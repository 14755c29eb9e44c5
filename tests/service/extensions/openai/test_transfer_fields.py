"""What is refused of a trainer's tensors before any of them is received."""

from __future__ import annotations

from typing import Any

import pytest

from service.errors import InvalidArgument
from service.extensions.openai.fields import Fields
from service.extensions.openai.transfer_fields import tensors_of

GIVEN: dict[str, Any] = {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[2, 3], []]}
BEFORE = [("c", "float16", [5])]


def test_their_bytes_are_counted() -> None:
    tensors, left_bytes = tensors_of(Fields(GIVEN), BEFORE, (), 30)
    assert (tensors, left_bytes) == ([("a", "float32", [2, 3]), ("b", "bfloat16", [])], 4)
    assert tensors_of(Fields({}), BEFORE, (), 30) == (BEFORE, 20)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"names": ["a", "a"]}, "names[1]"),
        ({"names": ["a", "known"]}, "names[1]"),
        ({"names": ["", "b"]}, "names[0]"),
        ({"names": [1, "b"]}, "names[0]"),
        ({"names": ["a"]}, "shapes"),
        ({"dtype_names": ["float32", "int8"]}, "dtype_names[1]"),
        ({"dtype_names": ["float32", ["float32"]]}, "dtype_names[1]"),
        ({"shapes": [[2, 0], []]}, "shapes[0]"),
        ({"shapes": [[2, True], []]}, "shapes[0]"),
        ({"shapes": [[1] * 9, []]}, "shapes[0]"),
        ({"shapes": [[1 << 62, 1 << 62], []]}, "shapes[0]"),
        ({"shapes": [[7], []]}, "shapes"),
        ({"ipc_handles_pickled": "gASVAA=="}, "ipc_handles_pickled"),
    ],
)
def test_others_are_refused_by_name(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        tensors_of(Fields({**GIVEN, **changed}), BEFORE, {"known"}, 29)
    assert refused.value.field == field
