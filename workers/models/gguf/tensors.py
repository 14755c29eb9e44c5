"""The tensors of a GGUF file, with the names and the order of rows of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workers.common.gguf.architectures import Architecture
from workers.common.gguf.header import Header, TensorInfo
from workers.common.gguf.settings import FACTORS
from workers.models.checkpoint import Staging, StoredTensor, TensorEntry, read_parts
from workers.models.errors import ModelError
from workers.models.files import FileVersion
from workers.models.gguf.activation_numbers import activation_numbers
from workers.models.gguf.library_names import LIBRARY_FAMILIES, MORE_NAMES
from workers.models.gguf.names import names_of
from workers.models.latent_parts import with_merged_latents
from workers.models.recurrent_settings import Mamba2Config, RecurrentConfig
from workers.models.registry import family_of

# The names of dtypes in a checkpoint. Quantised types keep the names of their formats.
_DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
# The numbers of dimensions of tensors of all experts.
_STACKED = {"weight": 3, "bias": 2}
_MATRIX, _MOST_PARTS = 2, 64
_MAX_DIGITS = 10
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_INTERLEAVED = ("attn_q", "attn_k")
_NORM_OF_SCAN, _DECAYS, _SKIPS, _CORRECTION = "ssm_norm", "ssm_a", "ssm_d", "exp_probs_b"
_GATE_OF_SHARED = "ffn_gate_inp_shexp"

Shape = tuple[int, ...]


def _vector(shape: Shape) -> Shape:
    return (math.prod(shape),)


def _without_column(shape: Shape) -> Shape:
    return shape[:-1] if len(shape) == _MATRIX and shape[-1] == 1 else shape


def _convolution(shape: Shape) -> Shape:
    return (shape[0], 1, *shape[1:]) if len(shape) == _MATRIX else shape


def _row(shape: Shape) -> Shape:
    return (1, *shape) if len(shape) == 1 else shape


# Conversions to a checkpoint's shape, by the tensor's name in a file.
_RESHAPED: dict[str, Callable[[Shape], Shape]] = {
    "ssm_conv1d": _convolution,
    "conv": _convolution,
    _DECAYS: _without_column,
    _SKIPS: _without_column,
    _NORM_OF_SCAN: _vector,
    _GATE_OF_SHARED: _row,
}


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a GGUF file, and the file's version when it was read."""

    path: Path
    version: FileVersion
    content: Header


@dataclass(frozen=True)
class GgufTensor(TensorEntry):
    """A tensor of a GGUF file that may differ from that of a checkpoint.

    Attributes:
        head_rows: The number of rows of a head, in which the rows of rotated pairs are interleaved. In a
            checkpoint all first ones come before all second ones. 0: the order is a checkpoint's.
        offset: Its values minus those of a checkpoint.
        of_logarithms: Its values are -exp of a checkpoint's. Values that are not negative become not finite.
    """

    head_rows: int = 0
    offset: float = 0.0
    of_logarithms: bool = False

    def parts(
        self, rows: range | None = None, staging: Staging | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `StoredTensor`: whole heads, in the order of a checkpoint."""
        for first, part in read_parts(self, rows, staging, self.head_rows or 1):
            # In place: a GPU may copy from this memory.
            if self.head_rows:
                pairs = part.view(-1, self.head_rows // 2, 2, *part.shape[1:])
                part.copy_(pairs.transpose(1, 2).reshape(part.shape))
            if self.offset:
                part.sub_(self.offset)
            if self.of_logarithms:
                part.neg_().log_()
            yield first, part


def stored_tensors(
    headers: list[FileHeader], architecture: Architecture, settings: Mapping[str, object]
) -> dict[str, StoredTensor]:
    """The tensors of a model's files, by their names in a checkpoint.

    An unknown tensor keeps its own name, with which it is refused later.

    Args:
        headers: The headers of all files.
        architecture: The architecture of the model.
        settings: The config of the model.

    Raises:
        ModelError: Two files have the same tensor, or a tensor has an impossible shape.
    """
    entries = _Entries(settings)
    head_rows = settings["head_dim"] if architecture.interleaved else 0
    if not isinstance(head_rows, int):
        raise ModelError(f"{headers[0].path}: the width of a head must be an integer, got {head_rows!r}")
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for info in header.content.tensors.values():
            if info.name in FACTORS:
                continue
            changes = _changes(header, info, architecture, head_rows)
            for name, entry in entries.of(header, info):
                if name in found:
                    raise ModelError(f"{header.path}: tensor {info.name} is there twice")
                found[name] = replace(entry, **changes)
    if architecture.model_type == "apertus":
        first, layers = headers[0], settings["num_hidden_layers"]
        found |= activation_numbers(first.content.metadata, first.path, layers)
    return with_merged_latents(found)


def _changes(
    header: FileHeader, info: TensorInfo, architecture: Architecture, head_rows: int
) -> dict[str, Any]:
    """The fields of `GgufTensor` for differences from a checkpoint's tensor. Raises ModelError."""
    part = _module(info.name)
    if head_rows and part in _INTERLEAVED:
        if head_rows < 2 or head_rows % 2 or not info.shape or info.shape[0] % head_rows:
            raise ModelError(
                f"{header.path}: tensor {info.name} must have rows for whole heads of {head_rows}"
            )
        return {"head_rows": head_rows}
    changes: dict[str, Any] = {}
    if architecture.norm_offset and len(info.shape) == 1 and is_norm(info.name):
        changes["offset"] = architecture.norm_offset
    if part == _CORRECTION and architecture.model_type == "ernie4_5_moe":
        changes["shape"] = _row(info.shape)
    if part in _RESHAPED:
        changes["shape"] = _RESHAPED[part](info.shape)
        changes["of_logarithms"] = part == _DECAYS
    if changes and info.type not in _DTYPES:
        raise ModelError(f"{header.path}: tensor {info.name} must be f32, got {info.type}")
    return changes


def written_shape(name: str, shape: Shape, sizes: RecurrentConfig | None) -> Shape:
    """The shape of a tensor in a file: the reverse of `_RESHAPED`.

    Args:
        name: Its name in the file.
        shape: Its shape in a checkpoint.
        sizes: The settings of the model's recurrent layers.
    """
    part = _module(name)
    if part == _GATE_OF_SHARED:
        return shape[1:]
    if isinstance(sizes, Mamba2Config) and part in (_DECAYS, _SKIPS):
        return (*shape, 1)
    if isinstance(sizes, Mamba2Config) and part == _NORM_OF_SCAN:
        return sizes.groups, shape[0] // sizes.groups
    return shape if len(shape) <= _MATRIX else (shape[0], *shape[_MATRIX:])  # of convolutions


def is_interleaved(name: str, architecture: Architecture) -> bool:
    """Whether a file's tensor with this name has interleaved rows; see `GgufTensor`."""
    return architecture.interleaved and _module(name) in _INTERLEAVED


def is_norm(name: str) -> bool:
    """Whether a file's tensor is the weight of a norm of the hidden width or of attention heads."""
    return name.endswith("norm.weight") and _module(name) != _NORM_OF_SCAN


def has_decays(name: str) -> bool:
    """Whether a file's tensor has -exp of a checkpoint's values."""
    return _module(name) == _DECAYS


def _module(name: str) -> str:
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


class _Entries:
    """Converts tensors of a file to tensors of a checkpoint."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        model_type = str(settings["model_type"])
        self._names = names_of(LIBRARY_FAMILIES.get(model_type) or family_of(model_type))
        if model_type in MORE_NAMES:
            self._names |= MORE_NAMES[model_type]
        self._num_experts = next(filter(None, map(settings.get, _EXPERT_COUNTS)), None)
        first, more = settings["num_hidden_layers"], settings.get("mtp_num_hidden_layers", 0)
        assert isinstance(more, int)
        self._not_read = range(first, first + more) if isinstance(first, int) else range(0)

    def of(self, header: FileHeader, info: TensorInfo) -> Iterator[tuple[str, GgufTensor]]:
        """Yields the tensor, or one for each expert, by their names in a checkpoint.

        Raises ModelError for another number of experts, before any tensor is made.
        """
        entry = GgufTensor(
            info.name, header.path, _DTYPES.get(info.type, info.type), info.shape, info.begin, info.nbytes,
            header.version,
        )  # fmt: skip
        block, layer, part = (*info.name.split(".", 2), "", "")[:3]
        module, _, kind = part.rpartition(".")
        if not (block == "blk" and layer.isascii() and layer.isdigit() and len(layer) < _MAX_DIGITS):
            known = self._names.outside.get(info.name)
            yield from [(info.name, entry)] if known is None else _parts_of(entry, known)
        elif int(layer) in self._not_read:
            yield f"mtp.{info.name}", entry
        elif module in self._names.experts and len(info.shape) == _STACKED.get(kind):
            for name, own in self._of_experts(header, entry, self._names.experts[module]):
                yield f"model.layers.{layer}.{name}.{kind}", own
        else:
            known = self._names.in_checkpoint(part)
            yield info.name if known is None else f"model.layers.{layer}.{known}", entry

    def _of_experts(
        self, header: FileHeader, entry: GgufTensor, names: tuple[str, ...]
    ) -> Iterator[tuple[str, GgufTensor]]:
        """Yields the tensors of each expert, which are equal parts of the rows. Raises ModelError."""
        count, rows = entry.shape[:2]
        if count != self._num_experts:
            says = f"{count} experts, and the metadata say {self._num_experts!r}"
            raise ModelError(f"{header.path}: tensor {entry.name} is of {says}")
        if rows % len(names):
            raise ModelError(
                f"{header.path}: tensor {entry.name} must have an even number of rows, has {rows}"
            )
        shape, size = (rows // len(names), *entry.shape[2:]), entry.nbytes // (count * len(names))
        for number, name in enumerate(name.format(index) for index in range(count) for name in names):
            yield name, replace(entry, shape=shape, begin=entry.begin + number * size, nbytes=size)


def _parts_of(entry: GgufTensor, name: str) -> Iterator[tuple[str, GgufTensor]]:
    """Yields a tensor; or if its name contains {} for a number, the parts along its first dimension."""
    if "{}" not in name or len(entry.shape) <= _MATRIX or entry.shape[0] > _MOST_PARTS:
        yield name, entry
        return
    size = entry.nbytes // entry.shape[0]
    for number in range(entry.shape[0]):
        begin = entry.begin + number * size
        yield name.replace("{}", str(number)), replace(entry, shape=entry.shape[1:], begin=begin, nbytes=size)


def read_vector(header: FileHeader, info: TensorInfo, most: int) -> list[float]:
    """A vector of float32. Raises ModelError if it is something else, or longer than `most`."""
    if info.type != "f32" or len(info.shape) != 1 or info.shape[0] > most:
        raise ModelError(f"{header.path}: tensor {info.name} must be a vector of at most {most} float32")
    entry = TensorEntry(
        info.name, header.path, _DTYPES[info.type], info.shape, info.begin, info.nbytes, header.version
    )
    return [value for _, part in entry.parts() for value in part.tolist()]
