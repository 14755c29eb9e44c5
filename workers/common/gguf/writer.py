"""Writes the header of a GGUF file, which `workers.common.gguf.header` reads.

Source: docs/gguf.md of ggml, for version 3. Integers become uint32, and in arrays int32.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.common.gguf import GgufError
from workers.common.gguf.header import MAGIC, TYPES, VERSIONS, Value

ALIGNMENT = 32
_NUMBERS = {name: (number, block, nbytes) for number, (name, block, nbytes) in TYPES.items()}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written.

    Attributes:
        name: Its name in the file.
        shape: As a checkpoint has it.
        type: A name of `TYPES`.
    """

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        """Its size in the file. Raises GgufError if its rows are not whole blocks."""
        _, block, block_bytes = _NUMBERS[self.type]
        if self.shape[-1] % block:
            raise GgufError(
                f"tensor {self.name}: has rows of {self.shape[-1]} values, and {self.type} blocks of {block}"
            )
        return math.prod(self.shape) // block * block_bytes


def written_header(metadata: Mapping[str, Value], tensors: Sequence[NewTensor]) -> bytes:
    """All of a file before its tensors, which follow in order, each filled up to `padded` bytes.

    Raises:
        GgufError: A value or a tensor cannot be written; the message names it.
    """
    parts = [MAGIC, struct.pack("<IQQ", max(VERSIONS), len(tensors), len(metadata))]
    for key, value in metadata.items():
        parts += _text(key), _value(key, value)
    offset = 0
    for tensor in tensors:
        dimensions = len(tensor.shape)
        sizes = struct.pack(f"<I{dimensions}Q", dimensions, *reversed(tensor.shape))
        parts += _text(tensor.name), sizes, struct.pack("<IQ", _NUMBERS[tensor.type][0], offset)
        offset += padded(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(padded(len(header)), b"\0")


def padded(nbytes: int) -> int:
    """A size, filled up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _text(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _value(key: str, value: Value) -> bytes:
    if not isinstance(value, list):
        return struct.pack("<I", _type_of(key, value, is_item=False)) + _content(key, value, is_item=False)
    kinds = {_type_of(key, item, is_item=True) for item in value}
    if len(kinds) != 1:
        raise GgufError(f"{key}: an array must have items of one type")
    content = b"".join([_content(key, item, is_item=True) for item in value])
    return struct.pack("<IIQ", _ARRAY, kinds.pop(), len(value)) + content


def _type_of(key: str, value: object, *, is_item: bool) -> int:
    match value:
        case bool():
            return _BOOL
        case int():
            return _INT32 if is_item else _UINT32
        case float():
            return _FLOAT32
        case str():
            return _STRING
    raise GgufError(f"{key}: a {type(value).__name__} has no type in GGUF")


def _content(key: str, value: object, *, is_item: bool) -> bytes:
    if isinstance(value, str):
        return _text(value)
    form = {_BOOL: "<?", _INT32: "<i", _UINT32: "<I", _FLOAT32: "<f"}[_type_of(key, value, is_item=is_item)]
    try:
        return struct.pack(form, value)
    except (struct.error, OverflowError):
        raise GgufError(f"{key}: {value} does not fit into 32 bits") from None
