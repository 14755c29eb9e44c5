"""8-bit floats: weight [O, I], and weight_scale or weight_scale_inv by matrix, by row or by block.

A weight is scale * value. Source: `Fp8Dequantize` of transformers' integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernels.float8_weight import Float8Format
from workers.common.quantised.scheme import Scheme
from workers.models.errors import ModelError, UnsupportedError
from workers.models.quantised.matrix import Float8Rows, QuantisedMatrix
from workers.models.quantised.tensors import EXPONENTS, FLOAT8, SCALES, Tensors, read, read_scales, spread

_SCALES = ("weight_scale_inv", "weight_scale")


class Float8Matrix(QuantisedMatrix):
    """A matrix in this layout."""

    def __init__(self, tensors: Tensors, scheme: Scheme) -> None:
        """Check the headers. Raises ModelError."""
        self._values = tensors.need_matrix("weight", FLOAT8)
        outputs, inputs = self._values.shape
        named = [name for name in _SCALES if name in tensors.entries]
        if len(named) > 1:
            raise ModelError(
                f"{self._values.file}: tensor {self._values.name} has two scales: {', '.join(named)}"
            )
        self._scales = tensors.need(named[0] if named else _SCALES[0], (*SCALES, *EXPONENTS))
        self._block = scheme.block
        allowed: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
        if self._block is not None:
            allowed = [(-(-outputs // self._block[0]), -(-inputs // self._block[1]))]
        if self._scales.shape not in allowed:
            shapes = f"shape {list(self._scales.shape)}, but must have {list(allowed[-1])}"
            raise ModelError(f"{self._scales.file}: tensor {self._scales.name} has {shapes}")
        super().__init__(self._values.name, [self._values, self._scales], (outputs, inputs))
        of_row = self._block is None or self._block[1] >= inputs
        try:
            self._form = Float8Format(0 if of_row or self._block is None else self._block[1])
        except ValueError as error:
            raise UnsupportedError(f"tensor {self.name}: {error}") from None

    def _parts(self, ranges: Sequence[range]) -> Iterator[tuple[int, Float8Rows]]:
        scales = read_scales(self._scales).float()
        if self._block is None:
            scales = spread(scales, self.shape[0])
        for rows in ranges:
            of_rows = torch.arange(rows.start, rows.stop)
            if self._block is not None:
                of_rows //= self._block[0]
            yield rows.start, Float8Rows(read(self._values, rows), scales[of_rows])
