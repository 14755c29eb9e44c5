"""Parses the fields of vLLM's weight transfer calls: the trainer's group, and the announced tensors."""

from __future__ import annotations

import base64
import math
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

from service.errors import InvalidArgument
from service.extensions.openai.fields import Fields, array, bad_field, boolean, integer, string

NCCL = "nccl"
# (name, dtype, shape) of a tensor.
Announced: TypeAlias = tuple[str, str, Sequence[int]]
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MAX_TENSORS, _MAX_NAME_CHARACTERS, _MAX_DIMENSIONS = 1 << 18, 512, 8
_MAX_RANKS, _MAX_PORT, _MAX_PACKED_BYTES = 1 << 16, 65535, 1 << 40
# vLLM's default.
_PACKED_BYTES = 1 << 30
_UNIQUE_ID_BYTES = 128


def group_of(given: Fields, backend: str) -> dict[str, Any]:
    """The arguments with which `workers.weight_receiver` joins a group. Raises InvalidArgument."""
    unique_id = given.get("nccl_unique_id_b64", string) if backend == NCCL else None
    host = port = None
    if unique_id is None:
        host = given.required("master_address")
        port = _required(given, "master_port", 1, _MAX_PORT)
    elif not _is_unique_id(unique_id):
        raise bad_field(given.path("nccl_unique_id_b64"), f"must be base64 of {_UNIQUE_ID_BYTES} bytes")
    world_size = _required(given, "world_size", 2, _MAX_RANKS)
    rank = given.get("rank_offset", integer, 1, world_size - 1) or 1
    packed_bytes = given.get("packed_buffer_size_bytes", integer, 1, _MAX_PACKED_BYTES) or _PACKED_BYTES
    is_packed = given.get("packed", boolean)
    given.refuse_others({"packed_num_buffers"})
    return {
        "backend": backend,
        "host": host,
        "port": port,
        "unique_id": unique_id,
        "world_size": world_size,
        "rank": rank,
        "packed_bytes": packed_bytes if is_packed else 0,
    }


def tensors_of(
    given: Fields, before: Sequence[Announced], received: Container[str], left_bytes: int
) -> tuple[Sequence[Announced], int]:
    """The announced tensors, and `left_bytes` without their sizes. Raises InvalidArgument.

    `before`: the tensors of the previous call, which is repeated if none are named. `received`: the names of
    tensors of this update that were received already.
    """
    names, dtypes, shapes = (
        given.get(name, array, _MAX_TENSORS) or [] for name in ("names", "dtype_names", "shapes")
    )
    given.refuse_others()
    if not len(names) == len(dtypes) == len(shapes):
        raise bad_field(given.path("shapes"), "must be as long as names and dtype_names")
    tensors = list(zip(names, dtypes, shapes, strict=True)) or before
    if not tensors:
        raise bad_field(given.path("names"), "must have at least one entry")
    seen: set[str] = set()
    size_bytes = 0
    for index, (name, dtype, shape) in enumerate(tensors):
        field = given.path(f"names[{index}]")
        is_new = string(name, field) not in seen and name not in received
        if not is_new or not 0 < len(name) <= _MAX_NAME_CHARACTERS:
            raise bad_field(field, f"must have 1 to {_MAX_NAME_CHARACTERS} characters, and be new")
        seen.add(name)
        if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
            raise bad_field(given.path(f"dtype_names[{index}]"), f"must be one of {', '.join(_ITEM_BYTES)}")
        field = given.path(f"shapes[{index}]")
        for size in array(shape, field, _MAX_DIMENSIONS):
            integer(size, field, 1, left_bytes)
        size_bytes += math.prod(shape) * _ITEM_BYTES[dtype]
    if size_bytes > left_bytes:
        why = f"the tensors have more than the {left_bytes} bytes that are left for them"
        raise InvalidArgument("BAD_WEIGHTS", given.path("shapes"), why)
    return tensors, left_bytes - size_bytes


def _required(given: Fields, name: str, minimum: int, maximum: int) -> int:
    value = given.get(name, integer, minimum, maximum)
    if value is None:
        raise bad_field(given.path(name), "is required")
    return value


def _is_unique_id(encoded: str) -> bool:
    try:
        return len(base64.b64decode(encoded, validate=True)) == _UNIQUE_ID_BYTES
    except ValueError:
        return False
