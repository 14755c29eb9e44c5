"""Separates the matrices of experts that a checkpoint has in one tensor for all experts of a layer.

In gpt_oss, tensors are gate_up_proj [E, C, 2 * I], in which outputs of gate and up alternate, down_proj
[E, I, C], and their biases [E, 2 * I] and [E, C]. In MXFP4 a matrix is [E, outputs, inputs]; see
`workers.models.quantised.mxfp4`. In Qwen3-VL, gate_up_proj has the outputs of gate before those of up, and is
[E, C, 2 * I] as published, or [E, 2 * I, C] as the library saves it; the latter if both could be, as the
library reads it. Granite has the second of these layouts, under names of its own. Here each becomes a matrix
[outputs, inputs] of one projection of one expert, as a checkpoint of another family has it.

Dimension letters: C hidden width; I intermediate width of an expert; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from workers.models.checkpoint import DTYPES, Staging, StoredTensor, TensorEntry
from workers.models.errors import ModelError, UnsupportedError
from workers.models.family import ExpertNames
from workers.models.quantised.mxfp4 import Mxfp4Experts
from workers.models.row_ranges import RowRanges

_GATE_UP, _DOWN, _BIAS = "gate_up_proj", "down_proj", "_bias"
# The most experts of a layer. More would only fill memory with descriptions of tensors.
_MAX_EXPERTS = 4096
_STACK = 3


class _Transposed(StoredTensor):
    """A matrix [O, I] that a file stores by columns."""

    def __init__(self, columns: TensorEntry) -> None:
        self._columns = columns
        self.name, self.file, self.dtype = columns.name, columns.file, columns.dtype
        self.shape, self.begin, self.nbytes = columns.shape[::-1], columns.begin, columns.nbytes

    def parts(
        self,
        rows: range | None = None,
        staging: Staging | None = None,  # noqa: ARG002 - as in the interface
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `StoredTensor`. Yields one part, since any row needs the whole tensor of the file.

        It always has its own memory, so copies to a GPU are synchronous.
        """
        wanted = range(self.shape[0]) if rows is None else rows
        found = torch.empty(len(wanted), self.shape[1], dtype=DTYPES[self.dtype])
        for first, columns in self._columns.parts():
            found[:, first : first + len(columns)] = columns[:, wanted.start : wanted.stop].T
        yield wanted.start, found

    def samples(self) -> Iterator[bytes]:
        return self._columns.samples()


def separated(
    entries: Mapping[str, StoredTensor], names: ExpertNames, count: int, width: int
) -> dict[str, StoredTensor]:
    """The tensors of a model with a tensor for each expert's matrix; see the module.

    Args:
        entries: The tensors, by their names in a checkpoint.
        names: The names of the family.
        count: The number of experts of a layer.
        width: C.

    Raises:
        ModelError: A tensor has another number of experts, or an impossible shape.
    """
    found: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        layer, part = _place(name, names)
        if layer is None:
            found[name] = entry
            continue
        turned = _inputs_first(entry, part, names, width)
        _check(entry, part, count, -1 if turned else 1)
        for expert in range(count):
            matrix = _taken(entry, expert, turned=turned)
            for own, rows in _projections(part, matrix.shape[0], names):
                found[layer + own.format(expert)] = RowRanges(matrix, rows)
    return found


def separated_values(tensors: Mapping[str, torch.Tensor], names: ExpertNames) -> dict[str, torch.Tensor]:
    """The same for tensors in memory: views of them, by their names in a checkpoint.

    Matrices are [outputs, inputs], as the library saves them, unless gate and up alternate.
    """
    found: dict[str, torch.Tensor] = {}
    for name, stack in tensors.items():
        layer, part = _place(name, names)
        if layer is None:
            found[name] = stack
            continue
        for expert, own in enumerate(stack):
            matrix = own.T if names.interleaved and not part.endswith(_BIAS) else own
            for projection, rows in _projections(part, len(matrix), names):
                found[layer + projection.format(expert)] = matrix[rows.start : rows.stop : rows.step]
    return found


def _place(name: str, names: ExpertNames) -> tuple[str | None, str]:
    """The layer's prefix of a name, and the part. None: it is no tensor of all experts."""
    layer, _, part = name.partition(names.stacked or "\n")
    for own, known in zip(names.stacked_parts, (_GATE_UP, _DOWN), strict=True):
        if part in (own, own + _BIAS):
            return layer, known + part.removeprefix(own)
    return None, part


def _inputs_first(entry: StoredTensor, part: str, names: ExpertNames, width: int) -> bool:
    """Whether each matrix is [inputs, outputs]."""
    if names.interleaved:
        return not isinstance(entry, Mxfp4Experts)
    return len(entry.shape) == _STACK and entry.shape[2 if part.startswith(_GATE_UP) else 1] != width


def _check(entry: StoredTensor, part: str, count: int, of_outputs: int) -> None:
    """Checks a tensor's shape. `of_outputs`: the dimension of a matrix's outputs. Raises ModelError."""
    outputs = entry.shape[min(of_outputs, len(entry.shape) - 1)] if entry.shape else 0
    dimensions = _STACK - part.endswith(_BIAS)
    if len(entry.shape) != dimensions or 0 in entry.shape or (part.startswith(_GATE_UP) and outputs % 2):
        raise ModelError(f"{entry.file}: tensor {entry.name} has shape {list(entry.shape)}, which cannot be")
    if entry.shape[0] != count or count > _MAX_EXPERTS:
        says = f"is of {entry.shape[0]} experts, and the config says {count}, of at most {_MAX_EXPERTS}"
        raise ModelError(f"{entry.file}: tensor {entry.name} {says}")
    if not isinstance(entry, TensorEntry | Mxfp4Experts):
        raise UnsupportedError(
            f"{entry.file}: tensor {entry.name} is quantised, and of all experts of a layer"
        )
    if isinstance(entry, TensorEntry) and entry.dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ModelError(f"{entry.file}: tensor {entry.name} must be one of {known}, got {entry.dtype}")


def _taken(stack: StoredTensor, expert: int, *, turned: bool) -> StoredTensor:
    """The matrix [O, I] of an expert, or its bias."""
    if isinstance(stack, Mxfp4Experts):
        return stack.of_expert(expert)
    assert isinstance(stack, TensorEntry)
    own = stack.element(expert)
    return _Transposed(own) if turned and len(own.shape) > 1 else own


def _projections(part: str, outputs: int, names: ExpertNames) -> Iterator[tuple[str, range]]:
    """The names of an expert's tensors in a part, with the outputs of each."""
    kind = ".bias" if part.endswith(_BIAS) else ".weight"
    if part.startswith(_DOWN):
        yield names.down + kind, range(outputs)
    elif names.interleaved:
        yield names.gate + kind, range(0, outputs, 2)
        yield names.up + kind, range(1, outputs, 2)
    else:
        yield names.gate + kind, range(outputs // 2)
        yield names.up + kind, range(outputs // 2, outputs)
