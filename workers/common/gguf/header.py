"""Reads the header of a GGUF file: metadata, and where each tensor is.

The file may be hostile. It is read, never mapped into memory, where a read beyond the end of a file that was
cut short kills the process. Each count and length is compared with the rest of the file, and with a limit,
before anything is read or allocated for it. What tensors contain is not read here.

Source: docs/gguf.md of ggml, for versions 2 and 3. Numbers are little-endian.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Collection
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, TypeAlias

from workers.common.gguf import GgufError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
Value: TypeAlias = bool | int | float | str | list[bool] | list[int] | list[float] | list[str]

# Names of types of tensors by their numbers, with the values and the bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 30: ("bf16", 1, 2), 28: ("f64", 1, 8),
    24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8),
    2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34), 9: ("q8_1", 32, 40), 20: ("iq4_nl", 32, 18), 39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
    10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144), 13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74), 18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50),
    21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82), 23: ("iq4_xs", 256, 136), 29: ("iq1_m", 256, 56),
    34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66),
}  # fmt: skip

# Types of metadata: formats of `struct`, by their numbers.
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Several times what the largest known files have: 262,144 tokens, 1,000 tensors and 50 keys.
_MAX_KEYS, _MAX_TENSORS, _MAX_ITEMS = 1 << 14, 1 << 17, 1 << 22
_MAX_KEY_BYTES, _MAX_TEXT_BYTES, _MAX_HEADER_BYTES = 1 << 16, 1 << 20, 256 << 20
_MAX_DIMENSIONS, _MAX_SIZE = 4, 1 << 62
_MAX_ALIGNMENT = 1 << 16
_MOST_SHOWN = 80
# Longer arrays are read only if they are asked for.
_SHORT = 4096


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        name: Its name in the file.
        shape: As a checkpoint has it: the reverse of the file's, whose first dimension is that of a row.
        type: A name of `TYPES`.
        begin: Offset in bytes of its first byte in the file.
        nbytes: Its size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    begin: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file.

    Attributes:
        metadata: By their keys. Without the long arrays that were not asked for.
        tensors: By their names.
    """

    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(file: BufferedReader, arrays: Collection[str] = ()) -> Header:
    """Read the header of a file.

    Args:
        file: The file from its beginning, open for reading, and regular.
        arrays: Keys of long arrays that are read too.

    Raises:
        GgufError: It is not GGUF, of another version or byte order, cut short, or says what cannot be.
        OSError: It cannot be read.
    """
    file_bytes = os.fstat(file.fileno()).st_size
    reader = _Reader(file, file_bytes)
    _check_version(reader)
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    # A tensor's entry takes 24 bytes at least, and a key's 13.
    reader.check_count("tensors", num_tensors, 24, _MAX_TENSORS)
    reader.check_count("keys of metadata", num_keys, 13, _MAX_KEYS)
    metadata = _metadata(reader, num_keys, arrays)
    entries = [_tensor_entry(reader) for _ in range(num_tensors)]
    return Header(metadata, _placed(entries, _data_begin(reader, metadata), file_bytes))


class _Reader:
    """Reads the file in order, and nothing beyond its end."""

    def __init__(self, file: BufferedReader, size: int) -> None:
        self._file = file
        self._left = size
        self.position = 0

    def take(self, nbytes: int) -> bytes:
        """The next bytes, which the caller has limited. Raises GgufError if the file ends before."""
        self.position += nbytes
        if self.position > _MAX_HEADER_BYTES:
            raise GgufError(f"the header is larger than {_MAX_HEADER_BYTES >> 20} MiB")
        self._left -= nbytes
        taken = self._file.read(nbytes) if self._left >= 0 else b""
        if len(taken) != nbytes:
            raise GgufError(f"is cut short: it ends inside of the header, at byte {self.position - nbytes}")
        return taken

    def number(self, kind: str) -> int:
        """A number, of an integer format of `struct`."""
        return int(struct.unpack("<" + kind, self.take(struct.calcsize("<" + kind)))[0])

    def text(self, what: str, max_bytes: int) -> str:
        """A string. Raises GgufError if it is longer, or not UTF-8."""
        nbytes = self.number("Q")
        if nbytes > min(max_bytes, self._left):
            raise GgufError(f"{what}: has {nbytes} bytes, which is more than {self._allowed(max_bytes)}")
        try:
            return self.take(nbytes).decode()
        except UnicodeDecodeError:
            raise GgufError(f"{what}: is not UTF-8") from None

    def check_count(self, what: str, count: int, least_bytes: int, most: int) -> None:
        """Raises GgufError for a count that the rest of the file cannot hold, or that is too large."""
        if count > min(most, self._left // least_bytes):
            raise GgufError(f"has {count} {what}, which is more than {self._allowed(most)}")

    def _allowed(self, most: int) -> str:
        return f"{most}, or than fit into the file"


def _check_version(reader: _Reader) -> None:
    """Raises GgufError for another file, and for a version that is not read."""
    if reader.take(4) != MAGIC:
        raise GgufError("is not a GGUF file")
    version = reader.number("I")
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise GgufError(
            "is big-endian: only little-endian files are served; convert it with gguf_convert_endian.py"
        )
    raise GgufError(f"has version {version} of GGUF: only 2 and 3 are served; convert the model again")


def _metadata(reader: _Reader, count: int, arrays: Collection[str]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    seen = set[str]()
    for _ in range(count):
        key = reader.text("a key of metadata", _MAX_KEY_BYTES)
        if key in seen:
            raise GgufError(f"{_shown(key)}: is there twice")
        seen.add(key)
        kind = reader.number("I")
        value = _value(reader, kind, key, is_wanted=key in arrays)
        if value is not None:
            found[key] = value
    return found


def _value(reader: _Reader, kind: int, key: str, *, is_wanted: bool) -> Any:
    """A value; None: an array that is left out. Raises GgufError."""
    name = _shown(key)
    if kind == _STRING:
        return reader.text(name, _MAX_TEXT_BYTES)
    if kind in _NUMBERS:
        (value,) = _numbers(reader, kind, 1, name)
        return value
    if kind != _ARRAY:
        raise GgufError(f"{name}: has type {kind}, which is none of GGUF")
    inner, count = reader.number("I"), reader.number("Q")
    is_kept = is_wanted or count <= _SHORT
    if inner == _STRING:
        reader.check_count(f"strings in {name}", count, 8, _MAX_ITEMS)
        texts = [reader.text(name, _MAX_TEXT_BYTES) for _ in range(count)]
        return texts if is_kept else None
    if inner not in _NUMBERS:
        raise GgufError(f"{name}: has an array of type {inner}, which is not read")
    reader.check_count(f"numbers in {name}", count, struct.calcsize("<" + _NUMBERS[inner]), _MAX_ITEMS)
    numbers = _numbers(reader, inner, count, name)
    return numbers if is_kept else None


def _numbers(reader: _Reader, kind: int, count: int, name: str) -> list[Any]:
    content = reader.take(count * struct.calcsize("<" + _NUMBERS[kind]))
    if kind == _BOOL and content.strip(b"\x00\x01"):
        raise GgufError(f"{name}: must be 0 or 1")
    return [*struct.unpack(f"<{count}{_NUMBERS[kind]}", content)]


def _tensor_entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of a tensor."""
    name = reader.text("the name of a tensor", _MAX_KEY_BYTES)
    num_dimensions = reader.number("I")
    if num_dimensions > _MAX_DIMENSIONS:
        raise GgufError(f"tensor {_shown(name)}: has {num_dimensions} dimensions: at most 4 are known")
    sizes = [reader.number("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(sizes)), reader.number("I"), reader.number("Q")


def _data_begin(reader: _Reader, metadata: dict[str, Value]) -> tuple[int, int]:
    """Where the tensors begin, and to what they are aligned."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & alignment - 1:
        raise GgufError(
            f"general.alignment: must be a power of two up to {_MAX_ALIGNMENT}, got {shown(alignment)}"
        )
    return -(-reader.position // alignment) * alignment, alignment


def _placed(
    entries: list[tuple[str, tuple[int, ...], int, int]], data: tuple[int, int], file_bytes: int
) -> dict[str, TensorInfo]:
    """The tensors, each inside of the file, and none over another one. Raises GgufError."""
    data_begin, alignment = data
    found: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        where = f"tensor {_shown(name)}"
        if name in found:
            raise GgufError(f"{where}: is there twice")
        if kind not in TYPES:
            raise GgufError(f"{where}: has type {kind}, which is not known")
        type_name, block, block_bytes = TYPES[kind]
        size = math.prod(shape)
        if not 0 < size < _MAX_SIZE:
            raise GgufError(f"{where}: has the shape {list(shape)}, which is empty or too large")
        if (shape[-1] if shape else 1) % block:
            raise GgufError(f"{where}: has rows of {shape[-1:]} values, and {type_name} blocks of {block}")
        nbytes = size // block * block_bytes
        if offset % alignment:
            raise GgufError(f"{where}: begins at {offset}, which is no multiple of {alignment}")
        if data_begin + offset + nbytes > file_bytes:
            raise GgufError(f"{where}: ends beyond the end of the file, which is cut short")
        found[name] = TensorInfo(name, shape, type_name, data_begin + offset, nbytes)
    end, before = 0, ""
    for info in sorted(found.values(), key=lambda info: info.begin):
        if info.begin < end:
            raise GgufError(f"tensor {_shown(info.name)}: overlaps tensor {_shown(before)}")
        end, before = info.begin + info.nbytes, info.name
    return found


def _shown(name: str) -> str:
    """A name of a file as a message can have it."""
    return name if name.isascii() and name.isprintable() and len(name) <= _MOST_SHOWN else shown(name)


def shown(value: object) -> str:
    """A value of a file as a message can have it."""
    text = ascii(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
