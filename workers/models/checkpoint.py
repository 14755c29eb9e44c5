"""A directory of safetensors: which tensors it has, where, and their bytes.

Headers are read here and not only by the safetensors library, because its errors name neither tensor nor
file. Data is read through the library, which maps the file into memory. Mapped pages count as ours until they
are unmapped, so a file is opened anew for every part of at most `PART_BYTES`, and no tensor handed out
may be kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from workers.models.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PART_BYTES = 64 << 20

# Names in a safetensors header, and the dtypes that weights may have.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_SAMPLE_BYTES = 1024


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
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


def map_tensor(entry: Entry) -> torch.Tensor:
    """A tensor as it lies in its file, mapped: only what is read of it takes memory, which can be taken back.

    The file must not be changed while the tensor is in use; deleting it is fine.
    """
    dtype = DTYPES[entry.dtype]
    end = entry.begin + entry.nbytes
    storage = cast(
        torch.UntypedStorage,
        torch.UntypedStorage.from_file(str(entry.file), shared=False, nbytes=end),
    )
    return torch.empty(0, dtype=dtype).set_(
        storage, entry.begin // dtype.itemsize, entry.shape, _strides(entry.shape)
    )


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Of a row-major tensor, in elements."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def read_entries(directory: Path) -> dict[str, Entry]:
    """The tensors of a directory: of `model.safetensors`, else of the shards that the index names.

    Raises:
        ModelError: A file is missing, truncated or not safetensors; a tensor occurs twice; or the index and
            the shards do not agree.
    """
    single = directory / SINGLE_FILE
    if single.exists():
        return _read_header(single)
    index = directory / INDEX_FILE
    if not index.exists():
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
        valid until the next part is asked for: copy it, and drop every reference to it.

    Raises:
        ModelError: The file cannot be read.
    """
    rows = entry.shape[0] if entry.shape else 1
    step = max(1, PART_BYTES // max(1, entry.nbytes // max(1, rows)))
    for first in range(0, rows, step):
        try:
            with safe_open(str(entry.file), framework="pt", device="cpu") as file:
                if entry.shape:
                    yield first, file.get_slice(entry.name)[first : first + step]
                else:
                    yield first, file.get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{entry.file}: tensor {entry.name} cannot be read: {error}") from error


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
        ModelError: A file cannot be read.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=16)
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
        try:
            with entry.file.open("rb") as file:
                for offset in sorted({0, entry.nbytes // 2, max(0, entry.nbytes - _SAMPLE_BYTES)}):
                    file.seek(entry.begin + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, entry.nbytes - offset)))
        except OSError as error:
            raise ModelError(f"{entry.file}: tensor {name} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by name. Raises ModelError."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        weight_map = content["weight_map"]
        pairs = dict(weight_map.items())
    except OSError as error:
        raise ModelError(f"{index}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: must be JSON with an object weight_map") from error
    for name, shard in pairs.items():
        # A shard lies beside its index; nothing else on this machine is ours to open.
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelError(f"{index}: tensor {name} must name a file in the same directory, got {shard!r}")
    return pairs


def _read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file. Raises ModelError."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little")
            header = file.read(size) if size <= _MAX_HEADER_BYTES else b""
            file_bytes = path.stat().st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    if len(prefix) < 8 or len(header) != size:
        raise ModelError(f"{path}: is truncated or not a safetensors file")
    try:
        content = json.loads(header, object_pairs_hook=lambda pairs: _unique(pairs, path))
    except ValueError as error:
        raise ModelError(f"{path}: is not a safetensors file: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a safetensors file: the header must be an object")
    content.pop("__metadata__", None)
    return {name: _entry(name, value, path, 8 + size, file_bytes) for name, value in content.items()}


def _unique(pairs: list[tuple[str, object]], path: Path) -> dict[str, object]:
    """A JSON object whose keys must differ. Raises ModelError."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ModelError(f"{path}: tensor {name} occurs twice")
        found[name] = value
    return found


def _entry(name: str, value: object, path: Path, data_begin: int, file_bytes: int) -> Entry:
    """One entry of a header, checked against the file. Raises ModelError."""
    try:
        dtype = value["dtype"]  # type: ignore[index]  # a wrong type is one of the errors below
        shape = tuple(value["shape"])  # type: ignore[index]
        begin, end = value["data_offsets"]  # type: ignore[index]
        size = math.prod(shape)
        sound = min(shape, default=0) >= 0 <= begin <= end and isinstance(dtype, str)
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: tensor {name} has a corrupt header entry") from error
    if not sound:
        raise ModelError(f"{path}: tensor {name} has a corrupt header entry")
    if dtype in DTYPES and end - begin != size * DTYPES[dtype].itemsize:
        raise ModelError(f"{path}: tensor {name} is {dtype} {list(shape)} but has {end - begin} bytes")
    if data_begin + end > file_bytes:
        missing = data_begin + end - file_bytes
        raise ModelError(f"{path}: tensor {name} is truncated: the file is {missing} bytes too short")
    return Entry(name, path, dtype, shape, data_begin + begin, end - begin)
