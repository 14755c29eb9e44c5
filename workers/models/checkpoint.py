"""Stored tensors: their interface, and those of safetensors, whose headers and bytes are read here.

The safetensors library is not used, for three reasons. Its errors name neither tensor nor file. It opens
files again by name, so a file may be replaced in between. It maps files into memory, where a read beyond the
end of a truncated file kills the process. Here a file is refused if it changed after its header was read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

import torch

from kernels.group_formats import FORMATS
from kernels.weight_formats import WeightFormat
from workers.models.errors import ModelError
from workers.models.files import (
    FileVersion,
    changed_error,
    exists,
    file_version,
    open_regular,
    parse_object,
    read_object,
)
from workers.models.parts import Part

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# A part of this size fits into the CPU's cache. With larger ones a load takes twice as long.
PART_BYTES = 4 << 20
# How many times as much memory the values of quantised rows take while they are reordered.
_EXPANSION = 8

# Names in a safetensors header, and the dtypes that weights may have.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

# The format allows 100 MB. A header or index needs about 100 bytes per tensor.
_MAX_NAMES_BYTES = 32 << 20
_MAX_DIMENSIONS = 8
_SAMPLE_BYTES = 1024
_CHECKED_ELEMENTS = 64 << 20

# The dtype that the model is stored in, or on a CPU one that is faster.
AUTO = "auto"

_log = logging.getLogger(__name__)


class StoredTensor(ABC):
    """A tensor of a model, in any file format.

    Attributes:
        name: Its name in the files, for messages.
        file: The file that holds it, or the first of them.
        dtype: The type of its parts: a name of `DTYPES`, or of a quantised format.
        shape: Its shape in the model, even if files store it in blocks.
        begin: Where it begins in the file, in bytes. Tensors are read in this order.
        nbytes: The number of bytes that are read.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def form(self) -> WeightFormat | None:
        """The format in which quantised rows are held. None: parts have a dtype of `DTYPES`."""
        return FORMATS.get(self.dtype)

    @abstractmethod
    def parts(self, rows: range | None = None, staging: Staging | None = None) -> Iterator[tuple[int, Part]]:
        """The tensor in parts along its first dimension.

        Args:
            rows: Which of its rows; None: all.
            staging: The buffers for parts that are copied asynchronously. None: parts have their own memory.

        Yields:
            The index of the first row, and the part: about `PART_BYTES`, or a single row if that is larger.
            It has the `dtype` if that is in `DTYPES`; else it is `QuantisedRows`, or uint8 [n, bytes of a
            row] as the format stores rows. The next part overwrites it, so copy it; with `staging`, queue
            the copies.

        Raises:
            ModelError: A file cannot be read, or changed after its header was read.
        """

    @abstractmethod
    def samples(self) -> Iterator[bytes]:
        """Samples of its bytes, for the `fingerprint`. Raises ModelError."""


@dataclass(frozen=True)
class TensorEntry(StoredTensor):
    """A tensor that is contiguous in a file.

    Attributes:
        version: The file's version when its header was read.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int
    version: FileVersion

    def element(self, index: int) -> TensorEntry:
        """An element of the first dimension."""
        size = self.nbytes // self.shape[0]
        begin = self.begin + index * size
        return dataclasses.replace(self, shape=self.shape[1:], begin=begin, nbytes=size)

    def parts(
        self, rows: range | None = None, staging: Staging | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        return read_parts(self, rows, staging)

    def samples(self) -> Iterator[bytes]:
        """See `StoredTensor`: samples of the beginning, the middle and the end."""
        with _open(self) as file:
            for offset in sorted({0, self.nbytes // 2, max(0, self.nbytes - _SAMPLE_BYTES)}):
                file.seek(self.begin + offset)
                yield file.read(min(_SAMPLE_BYTES, self.nbytes - offset))


def choose_dtype(
    asked: torch.dtype | str, named: str | None, stored: str | None, device: torch.device
) -> torch.dtype:
    """Chooses the dtype to load a model in.

    Args:
        asked: A torch dtype or its name. AUTO: the dtype of the config, else of the stored tensor; but
            float32 instead of float16 on a CPU.
        named: The dtype that the config names.
        stored: The dtype of a tensor, as a header spells it.
        device: The device that will compute.

    Raises:
        ModelError: Weights cannot have this dtype.
    """
    allowed = {name_of(known): known for known in DTYPES.values()}
    name = asked if isinstance(asked, str) else name_of(asked)
    if name == AUTO:
        name = named or name_of(DTYPES.get(stored or "", torch.float32))
        if name == "float16" and device.type == "cpu":
            # There are no compiled kernels for float16. float32 holds the same values.
            name = "float32"
            _log.info("float16 weights become float32; dtype = bfloat16 needs half the memory and rounds")
    if name not in allowed:
        raise ModelError(f"dtype: must be {AUTO} or one of {', '.join(sorted(allowed))}, got {name!r}")
    return allowed[name]


def check_finite(tensor: torch.Tensor, where: str) -> None:
    """Raises ModelError, which begins with `where`, for NaN and infinity: they would spread to all logits."""
    # If the sum is finite, all terms are; it takes a tenth of the time of checking each. A sum that is not
    # finite may be an overflow of finite terms; a GPU converts on the way to one that seldom overflows.
    total = tensor.sum(dtype=torch.float32) if tensor.is_cuda else tensor.sum()
    if math.isfinite(total.item()):
        return
    rows = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    # In parts, because the check needs memory.
    for part in torch.split(rows, max(1, _CHECKED_ELEMENTS // max(1, rows.shape[1:].numel()))):
        if not part.isfinite().all():
            raise ModelError(f"{where} is not finite as {name_of(tensor.dtype)}")


def name_of(dtype: torch.dtype | str) -> str:
    """The name of a dtype in configs: "bfloat16" for torch.bfloat16 and "torch.bfloat16"."""
    return str(dtype).removeprefix("torch.")


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """The tensors in `model.safetensors`, else in the shards that the index names, by name.

    Or else in the only safetensors file: AutoGPTQ names it gptq_model-4bit-128g.safetensors, for example.

    Raises ModelError if a file is missing, truncated or not safetensors; a tensor occurs twice, or overlaps
    another; or the index contradicts the shards.
    """
    single = directory / SINGLE_FILE
    if exists(single):
        return read_header(single)
    index = directory / INDEX_FILE
    if not exists(index):
        files = [*directory.glob("*.safetensors")]
        if len(files) == 1:
            return read_header(files[0])
        raise ModelError(f"{directory}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _read_index(index)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_header(directory / shard).items():
            if name in entries:
                raise ModelError(f"{entry.file}: tensor {name} is also in {entries[name].file.name}")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            raise ModelError(f"{directory / shard}: tensor {name} is missing, {INDEX_FILE} lists it here")
    return entries


class Staging:
    """Two alternating buffers for parts of tensors: one is filled while the other is copied to a device."""

    def __init__(self, new_event: Callable[[], Any], *, pinned: bool) -> None:
        """`new_event`: `torch.cuda.Event`. `pinned`: whether buffers are in pinned memory."""
        self._pinned = pinned
        self._events = [new_event() for _ in range(2)]
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def next_buffer(self, nbytes: int) -> torch.Tensor:
        """The next buffer, [nbytes] uint8. Waits until its previous content was copied."""
        turn = self._turn = 1 - self._turn
        self._events[turn].synchronize()
        if self._buffers[turn].numel() < nbytes:
            size = max(nbytes, PART_BYTES)
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffers[turn][:nbytes]

    def copies_are_queued(self) -> None:
        """Must be called when all copies from the last buffer are queued."""
        self._events[self._turn].record()


def _own_buffer(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 in Python's memory: with torch's allocator up to 12 MiB more stayed in use."""
    # frombuffer refuses an empty buffer.
    return (
        torch.frombuffer(bytearray(nbytes), dtype=torch.uint8)
        if nbytes
        else torch.empty(0, dtype=torch.uint8)
    )


def read_parts(
    entry: TensorEntry, rows: range | None = None, staging: Staging | None = None, multiple: int = 1
) -> Iterator[tuple[int, torch.Tensor]]:
    """See `StoredTensor.parts`. Each part has a multiple of `multiple` rows, if `rows` has."""
    dtype = DTYPES.get(entry.dtype)
    count_all = entry.shape[0] if entry.shape else 1
    row_bytes = entry.nbytes // max(1, count_all)
    part_bytes = PART_BYTES if dtype is not None else PART_BYTES // _EXPANSION
    step = max(1, part_bytes // max(1, row_bytes * multiple)) * multiple
    wanted = range(count_all) if rows is None else rows
    own = _own_buffer(min(len(wanted), step) * row_bytes if staging is None else 0)
    with _open(entry) as file:
        file.seek(entry.begin + wanted.start * row_bytes)
        for first in range(wanted.start, wanted.stop, step):
            count = min(step, wanted.stop - first)
            nbytes = count * row_bytes
            filled = own[:nbytes] if staging is None else staging.next_buffer(nbytes)
            if file.readinto(filled.numpy().data) != nbytes:
                raise changed_error(entry.file)
            if dtype is None:
                yield first, filled.view(count, row_bytes)
            else:
                yield first, filled.view(dtype).reshape((count, *entry.shape[1:]) if entry.shape else ())
            if staging is not None:
                staging.copies_are_queued()


@contextmanager
def _open(entry: TensorEntry) -> Iterator[BufferedReader]:
    """Open a tensor's file. Raises ModelError if it cannot be read, or changed after its header was read."""
    try:
        with open_regular(entry.file) as file:
            if file_version(os.fstat(file.fileno())) != entry.version:
                raise changed_error(entry.file)
            yield file
    except OSError as error:
        raise ModelError(f"{entry.file}: tensor {entry.name} cannot be read: {error.strerror}") from error


def fingerprint(entries: Mapping[str, StoredTensor], seed: str) -> str:
    """A hash of the names, dtypes and shapes of all tensors, and of a sample of the bytes of each.

    It does not depend on how the tensors are sharded. Checkpoints that differ only outside the samples have
    the same fingerprint: it distinguishes models, and does not prove integrity.

    Args:
        entries: The tensors.
        seed: More to hash, such as the config.

    Returns:
        32 hexadecimal digits.

    Raises:
        ModelError: A file cannot be read, or changed after its header was read.
    """
    digest = hashlib.blake2b(seed.encode(), digest_size=16)
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"\n{name} {entry.dtype} {entry.shape}\n".encode())
        for sample in entry.samples():
            digest.update(sample)
    return digest.hexdigest()


def _read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by name. Raises ModelError."""
    weight_map = read_object(index, _MAX_NAMES_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index}: must have an object weight_map")
    for name, shard in weight_map.items():
        # Shards are in the directory of the index. No other file of this machine may be opened.
        if not isinstance(shard, str) or "/" in shard or shard == ".":
            raise ModelError(f"{index}: tensor {name} must name a file in the same directory, got {shard!r}")
    return weight_map


def read_header(path: Path, max_bytes: int = _MAX_NAMES_BYTES) -> dict[str, TensorEntry]:
    """The tensors of one file, by name. They must fill the file after the header without gaps.

    Raises ModelError, also for a header of more than `max_bytes`.
    """
    try:
        with open_regular(path) as file:
            prefix = file.read(8)
            size = int.from_bytes(prefix, "little")
            header = file.read(size) if size <= max_bytes else b""
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    file_bytes = status.st_size
    if len(prefix) < 8 or size + 8 > file_bytes:
        raise ModelError(f"{path}: is truncated or not a safetensors file")
    if len(header) != size:
        raise ModelError(f"{path}: the header is larger than {max_bytes >> 10} KiB")
    content = parse_object(header, path, "the header ")
    content.pop("__metadata__", None)
    data_begin = 8 + size
    entries = {name: _entry(name, value, path, data_begin, status) for name, value in content.items()}
    end, before = data_begin, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.nbytes)):
        if entry.begin != end:
            fault = "overlaps" if entry.begin < end else "does not start at the end of"
            raise ModelError(f"{path}: tensor {entry.name} {fault} {before}")
        end, before = entry.begin + entry.nbytes, f"tensor {entry.name}"
    if end != file_bytes:
        raise ModelError(f"{path}: is {file_bytes - end} bytes longer than its tensors")
    return entries


def _entry(name: str, value: object, path: Path, data_begin: int, status: os.stat_result) -> TensorEntry:
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
    return TensorEntry(name, path, dtype, tuple(shape), data_begin + begin, end - begin, file_version(status))


def _are_sizes(value: object, max_count: int) -> TypeGuard[list[int]]:
    """Whether it is a list of at most `max_count` integers from 0 to 2^63 - 1."""
    return (
        isinstance(value, list)
        and len(value) <= max_count
        # type(), since isinstance(True, int).
        and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
    )
