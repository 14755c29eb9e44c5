"""MXFP4 of gpt_oss: NAME_blocks uint8 [E, O, G, 16] and NAME_scales uint8 [E, O, G] for all experts.

A group is 32 inputs of an output: 4-bit floats (e2m1), two in a byte, the low half first; and an exponent e,
which stands for 2^(e - 127). GGUF has the same groups with another order of values, to which they are
converted.

Source: `convert_moe_packed_tensors` of transformers' integrations/mxfp4.py.

Dimension letters: n rows; O outputs; G groups; E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from kernels.group_formats import GROUP_INPUTS
from workers.models.checkpoint import Staging, StoredTensor, TensorEntry
from workers.models.errors import ModelError
from workers.models.quantised.tensors import Tensors, read

_FORMAT = "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES, _GROUP_BYTES = ("U8",), GROUP_INPUTS // 2
_BLOCK_DIMENSIONS = 4
# Larger ones overflow float32 when they multiply 6, or are NaN.
_MOST_EXPONENT = 252


class Mxfp4Matrix(StoredTensor):
    """The matrix [O, I] of one expert. Its parts are rows in GGUF's format."""

    dtype = _FORMAT

    def __init__(self, name: str, blocks: TensorEntry, scales: TensorEntry) -> None:
        """Take blocks [O, G, 16] and scales [O, G], whose headers were checked."""
        self._blocks, self._scales = blocks, scales
        outputs, groups = scales.shape
        self.name, self.file, self.shape = name, blocks.file, (outputs, groups * GROUP_INPUTS)
        self.begin, self.nbytes = blocks.begin, blocks.nbytes + scales.nbytes

    def parts(
        self, rows: range | None = None, staging: Staging | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """See `StoredTensor`. Raises ModelError for a scale that is not finite, or too large."""
        assert staging is None, "parts are transcoded before they are copied"
        groups = self._scales.shape[1]
        for first, raw in self._blocks.parts(rows):
            exponents = read(self._scales, range(first, first + len(raw)))  # [n, G]
            if int(exponents.max()) > _MOST_EXPONENT:
                scales = self._scales
                raise ModelError(f"{scales.file}: tensor {scales.name} is not finite, or too large")
            halves = raw.view(-1, groups, _GROUP_BYTES)
            values = torch.stack([halves & 15, halves >> 4], dim=3).flatten(2)  # [n, G, 32], in order
            low, high = values.chunk(2, dim=2)
            yield first, torch.cat([exponents[:, :, None], low | high << 4], dim=2).flatten(1)

    def samples(self) -> Iterator[bytes]:
        yield from self._blocks.samples()
        yield from self._scales.samples()


class Mxfp4Experts(StoredTensor):
    """The matrices [E, O, I] of all experts, which are read one by one."""

    dtype = _FORMAT

    def __init__(self, tensors: Tensors, name: str) -> None:
        """Check the headers of a module's tensors. Raises ModelError."""
        self._blocks = tensors.need(name + _BLOCKS, _BYTES)
        shape = self._blocks.shape
        if len(shape) != _BLOCK_DIMENSIONS or shape[3] != _GROUP_BYTES or 0 in shape:
            must = f"[experts, outputs, groups, {_GROUP_BYTES}], got {list(shape)}"
            raise ModelError(f"{self._blocks.file}: tensor {self._blocks.name} must be {must}")
        self._scales = tensors.need(name + _SCALES, _BYTES, shape[:3])
        self.name, self.file, self.begin = self._blocks.name, self._blocks.file, self._blocks.begin
        self.shape = (*shape[:2], shape[2] * GROUP_INPUTS)
        self.nbytes = self._blocks.nbytes + self._scales.nbytes

    def of_expert(self, expert: int) -> Mxfp4Matrix:
        """The matrix of one expert."""
        return Mxfp4Matrix(self.name, *(each.element(expert) for each in (self._blocks, self._scales)))

    def parts(
        self, rows: range | None = None, staging: Staging | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Must not be called: no weight takes more than one matrix."""
        raise NotImplementedError

    def samples(self) -> Iterator[bytes]:
        yield from self._blocks.samples()
        yield from self._scales.samples()


def mxfp4_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, StoredTensor]:
    """The tensors of a model, with blocks and scales merged under the matrices' names. Raises ModelError."""
    found: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        if name.endswith(_BLOCKS):
            module, _, part = name.rpartition(".")
            own = {last: entries[f"{module}.{last}"] for last in _both(part) if f"{module}.{last}" in entries}
            found[name.removesuffix(_BLOCKS)] = Mxfp4Experts(Tensors(module, own), part.removesuffix(_BLOCKS))
        elif not (name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in entries):
            found[name] = entry
    return found


def _both(part: str) -> tuple[str, str]:
    return part, part.removesuffix(_BLOCKS) + _SCALES
