"""A directory of safetensors: which tensors it has, where, and their bytes.

Files are read here and not by the safetensors library: its errors name neither tensor nor file, it opens
whatever has a file's name by then, and it maps them into memory, where touching what has been cut off kills
the process. A file that is not the one whose header was read is refused whenever it is opened.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TypeGuard

import torch

from workers.models.errors import ModelError
from workers.models.files import (
    Version,
    changed,
    is_there,
    open_regular,
    parse_object,
    read_whole,
    version_of,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What the processor's cache holds: of larger ones a load takes twice the time.
PART_BYTES = 4 << 20

# Names in a safetensors header, and the dtypes that weights may have.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# The format allows 100 MB. A header needs about 100 bytes a tensor, and so does an index.
_MAX_NAMES_BYTES = 32 << 20
_MAX_DIMENSIONS = 8
_SAMPLE_BYTES = 1024


# Asks for the dtype that a model is stored in.
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint.

    Attributes:
        name: Its name.
        file: The file that holds it.
        dtype: Its dtype as the header spells it.
        shape: Its shape.
        begin: Offset in bytes of its first byte in the file.
        nbytes: Its size in bytes.
        version: Of the file, when its header was read.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    version: Version


def choose_dtype(asked: torch.dtype | str, named: str | None, stored: str | None) -> torch.dtype:
    """The dtype to load in.

    Args:
        asked: A torch dtype or its name; AUTO: the one that is named, else the one that is stored.
        named: By the config.
        stored: Of a tensor, as a header spells it.

    Raises:
        ModelError: There is no such dtype for weights.
    """
    allowed = {_name_of(known): known for known in DTYPES.values()}
    name = asked if isinstance(asked, str) else _name_of(asked)
    if name == AUTO:
        name = named or _name_of(DTYPES.get(stored or "", torch.float32))
    if name not in allowed:
        raise ModelError(f"dtype: must be {AUTO} or one of {', '.join(sorted(allowed))}, got {name!r}")
    return allowed[name]


def check_finite(tensor: torch.Tensor, where: str) -> None:
    """Raises ModelError, saying where, for NaN and infinity: one of them in a weight is in every answer."""
    # A sum is finite only if its terms are, and takes a tenth of the time of looking at each of them; the
    # other way round it may overflow.
    if not math.isfinite(tensor.sum().item()) and not tensor.isfinite().all():
        raise ModelError(f"{where} is not finite as {_name_of(tensor.dtype)}")


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def map_tensor(entry: Entry) -> torch.Tensor:
    """A tensor as it lies in its file, mapped: only what is read of it takes memory, which can be taken back.

    The file must not be changed while the tensor is in use; deleting it is fine. Raises ModelError if it is
    not the one whose header was read.
    """
    with _open(entry) as file:
        mapped = mmap.mmap(file.fileno(), entry.begin + entry.nbytes, access=mmap.ACCESS_COPY)
    dtype, count = DTYPES[entry.dtype], math.prod(entry.shape)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=entry.begin).reshape(entry.shape)


def read_entries(directory: Path) -> dict[str, Entry]:
    """The tensors of a directory: of `model.safetensors`, else of the shards that the index names.

    Raises:
        ModelError: A file is missing, truncated or not safetensors; a tensor occurs twice, or shares bytes
            with another; or the index and the shards do not agree.
    """
    single = directory / SINGLE_FILE
    if is_there(single):
        return _read_header(single)
    index = directory / INDEX_FILE
    if not is_there(index):
        raise ModelError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _read_index(index)
    entries: dict[str, Entry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in _read_header(directory / shard).items():
            if name in entries:
                raise ModelError(f"{entry.file}: tensor {name} is also in {entries[name].file.name}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            raise ModelError(f"{directory / shard}: tensor {name} is missing, {INDEX_FILE} says it is here")
    return entries


def read_parts(entry: Entry) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensor in parts along its first dimension.

    Yields:
        The first row of the part, and the part: at most `PART_BYTES` unless a single row is larger. It is
        valid until the next part is asked for: copy it.

    Raises:
        ModelError: The file cannot be read, or is not the one whose header was read.
    """
    dtype = DTYPES[entry.dtype]
    rows = entry.shape[0] if entry.shape else 1
    row_bytes = entry.nbytes // max(1, rows)
    step = max(1, PART_BYTES // max(1, row_bytes))
    buffer = memoryview(bytearray(min(rows, step) * row_bytes))
    with _open(entry) as file:
        file.seek(entry.begin)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            filled = buffer[: count * row_bytes]
            if file.readinto(filled) != len(filled):
                raise changed(entry.file)
            shape = (count, *entry.shape[1:]) if entry.shape else ()
            # There is no tensor over an empty buffer.
            part = torch.frombuffer(filled, dtype=dtype) if len(filled) else torch.empty(0, dtype=dtype)
            yield first, part.reshape(shape)


@contextmanager
def _open(entry: Entry) -> Iterator[BufferedReader]:
    """The file of a tensor. Raises ModelError if it cannot be read, or is not the one with that header."""
    try:
        with open_regular(entry.file) as file:
            if version_of(os.fstat(file.fileno())) != entry.version:
                raise changed(entry.file)
            yield file
    except OSError as error:
        raise ModelError(f"{entry.file}: tensor {entry.name} cannot be read: {error.strerror}") from error


def fingerprint(entries: Mapping[str, Entry], seed: str) -> str:
    """A hash of what a checkpoint holds: names, dtypes, shapes and a sample of each tensor's bytes.

    The same however the tensors are spread over files. Two checkpoints that differ only between the samples
    have the same fingerprint: it tells models apart, it does not prove integrity.

    Args:
        entries: The tensors.
        seed: What else to hash, such as the config.

    Returns:
        32 hexadecimal digits.

    Raises:
        ModelError: A file cannot be read, or is not the one whose header was read.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=16)
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
        with _open(entry) as file:
            for offset in sorted({0, entry.nbytes // 2, max(0, entry.nbytes - _SAMPLE_BYTES)}):
                file.seek(entry.begin + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes - offset)))
    return digest.hexdigest()


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by name. Raises ModelError."""
    weight_map = parse_object(read_whole(index, _MAX_NAMES_BYTES), index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: must have an object weight_map")
    for name, shard in weight_map.items():
        # A shard lies beside its index; nothing else on this machine is ours to open.
        if not isinstance(shard, str) or "/" in shard or shard == ".":
            raise ModelError(f"{index}: tensor {name} must name a file in the same directory, got {shard!r}")
    return weight_map


def _read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file, which lie side by side from the header to its end. Raises ModelError."""
    try:
        with open_regular(path) as file:
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little")
            header = file.read(size) if size <= _MAX_NAMES_BYTES else b""
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    file_bytes = status.st_size
    if len(prefix) < 8 or size + 8 > file_bytes:
        raise ModelError(f"{path}: is truncated or not a safetensors file")
    if len(header) != size:
        raise ModelError(f"{path}: the header is larger than {_MAX_NAMES_BYTES >> 10} KiB")
    content = parse_object(header, path, "the header ")
    content.pop("__metadata__", None)
    data_begin = 8 + size
    entries = {name: _entry(name, value, path, data_begin, status) for name, value in content.items()}
    end, before = data_begin, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != end:
            fault = "overlaps" if entry.begin < end else "does not begin at the end of"
            raise ModelError(f"{path}: tensor {entry.name} {fault} {before}")
        end, before = entry.begin + entry.nbytes, f"tensor {entry.name}"
    if end != file_bytes:
        raise ModelError(f"{path}: is {file_bytes - end} bytes longer than its tensors")
    return entries


def _entry(name: str, value: object, path: Path, data_begin: int, status: os.stat_result) -> Entry:
    """One entry of a header, checked against the file. Raises ModelError."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (
        isinstance(dtype, str)
        and _are_sizes(shape, _MAX_DIMENSIONS)
        and _are_sizes(offsets, 2)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
    ):
        raise ModelError(f"{path}: tensor {name} has a corrupt header entry")
    begin, end = offsets
    size = math.prod(shape)
    if dtype in DTYPES and end - begin != size * DTYPES[dtype].itemsize:
        raise ModelError(f"{path}: tensor {name} is {dtype} {shape} but has {end - begin} bytes")
    if data_begin + end > status.st_size:
        missing = data_begin + end - status.st_size
        raise ModelError(f"{path}: tensor {name} is truncated: the file is {missing} bytes too short")
    return Entry(name, path, dtype, tuple(shape), data_begin + begin, end - begin, version_of(status))


def _are_sizes(value: object, most: int) -> TypeGuard[list[int]]:
    """Whether it is a list of at most so many integers, each of which a file can have of anything."""
    return (
        isinstance(value, list)
        and len(value) <= most
        # Not isinstance: true is not a size.
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )
