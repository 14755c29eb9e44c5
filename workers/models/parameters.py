"""Allocates the parameters of a model: matrices, projections and norms, which are filled from a checkpoint.

With ranks, those of one of them. Which parameters a layer has is decided in `builder`.

Dimension letters: C hidden width; V rows of the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch

from kernels import gpu_format
from kernels.experts import ExpertWeights
from kernels.gpu_experts import GpuExperts
from kernels.gpu_weight import GpuWeight
from kernels.linear import DenseWeight
from kernels.stacked_weight import StackedWeight
from kernels.weight import Weight
from kernels.weight_formats import HeldFormat, OnGpu, check_cut, new_weight
from workers import huge_pages
from workers.models.config import ModelConfig
from workers.models.errors import UnsupportedError
from workers.models.layers import Norm
from workers.models.linear import Linear
from workers.models.multipliers import factors
from workers.models.shard import Shard, Slice, row_parts

_OTHER_RANKS = "use another tensor_parallel, or the model in another format"

FormatOf = Callable[[str], HeldFormat | None]
"""The format of a matrix by its name in a checkpoint, such as "lm_head.weight"; None: it has the dtype."""


class Parameters:
    """Allocates parameters of a model, or of a rank's shard of it."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: Shard,
        formats: FormatOf | None,
    ) -> None:
        self._config = config
        self._shard = shard
        self._family = config.family
        self._dtype = dtype
        self._device = device
        self._formats = formats
        self._pieces = huge_pages.Pieces(device)

    def empty(self, *shape: int) -> torch.Tensor:
        return huge_pages.empty(shape, self._dtype, self._device)

    def matrix(self, rows: Mapping[str, int], inputs: int, taken: range | None = None) -> Weight:
        """A matrix made of some tensors of a checkpoint.

        Args:
            rows: The number of rows of each tensor, by name.
            inputs: The number of inputs.
            taken: The inputs that this rank has; None: all.

        Raises:
            UnsupportedError: A quantised format cannot be split at these inputs.
        """
        taken = range(inputs) if taken is None else taken
        forms = {name: None if self._formats is None else self._formats(name) for name in rows}
        for name, form in forms.items():
            try:
                check_cut(form, taken, inputs)
            except ValueError as error:
                raise UnsupportedError(f"tensor {name}: {error}: {_OTHER_RANKS}") from None
        if len({*forms.values()}) == 1:
            return self._matrix(sum(rows.values()), inputs, taken, forms[next(iter(rows))])
        return StackedWeight([self._matrix(rows[name], inputs, taken, form) for name, form in forms.items()])

    def _matrix(self, outputs: int, inputs: int, taken: range, form: HeldFormat | None) -> Weight:
        if form is None:
            return DenseWeight(self.empty(outputs, len(taken)))
        return new_weight(form, outputs, inputs, taken, self._dtype, self._pieces.empty)

    def matrices(self, named: Sequence[Mapping[str, int]], inputs: int, taken: range) -> ExpertWeights:
        """The matrices of all experts, as `matrix`: together on a GPU, else a list, packed one by one."""
        forms = [[None if self._formats is None else self._formats(name) for name in rows] for rows in named]
        if any(isinstance(form, OnGpu) for form in itertools.chain(*forms)):
            rows = {name: size * len(named) for name, size in named[0].items()}
            matrix = self.matrix(rows, inputs, taken)
            parts = matrix.parts if isinstance(matrix, StackedWeight) else [matrix]
            stacks = [part for part in parts if isinstance(part, GpuWeight)]
            if len(stacks) < len(parts) or any(of_expert != forms[0] for of_expert in forms):
                needed = "quantised experts must all have one format, in the order of their inputs, on a GPU"
                raise UnsupportedError(f"tensor {next(iter(rows))}: {needed}; use device = cpu")
            return GpuExperts(stacks, len(named))
        if gpu_format.is_gpu(torch.device(self._device)):
            return self.empty(len(named), sum(named[0].values()), len(taken))
        return [self.matrix(rows, inputs, taken) for rows in named]

    def of_vocabulary(self, name: str) -> Weight:
        """[V, C], or a rank's rows of it, padded with zeros."""
        matrix = self.matrix({name: self._shard.vocabulary_rows}, self._config.hidden_size)
        if len(matrix) > len(self._shard.vocabulary):
            # Zero bytes are zeros in every format.
            matrix.data.zero_()
        return matrix

    def linear(
        self,
        place: str,
        taken: Mapping[str, Slice],
        *,
        bias: bool,
        stored: Mapping[str, Slice] | None = None,
        inputs: tuple[range, ...] = (),
        factors: tuple[tuple[int, float], ...] = (),
    ) -> Linear:
        """Fused projections of the same inputs; see `Linear`. `place`: the prefix of their tensors."""
        rows = {f"{place}{name}.weight": part.num_rows for name, part in (stored or taken).items()}
        one = next(iter(taken.values()))
        matrix = self.matrix(rows, one.shape[1], one.columns)
        offsets = self.empty(sum(rows.values())) if bias else None
        return Linear(taken, matrix, offsets, stored=stored, inputs=inputs, factors=factors)

    def projections(
        self,
        place: str,
        names: Sequence[str],
        sizes: Sequence[int],
        parts: Sequence[range],
        *,
        bias: bool,
        stored: Sequence[str] = (),
        multipliers: Sequence[float] = (),
    ) -> Linear:
        """Projections of the hidden width to `sizes`, of which a rank has `parts`. One name: it is fused.

        `stored`: their names in the files, if these are not the model's own checkpoint.
        `multipliers`: the factors of their outputs.
        """
        return self.linear(
            place,
            self._rows(names, sizes, parts),
            bias=bias,
            stored=self._rows(stored, sizes, parts) if stored else None,
            factors=factors([*map(len, parts)], multipliers),
        )

    def _rows(self, names: Sequence[str], sizes: Sequence[int], parts: Sequence[range]) -> dict[str, Slice]:
        width = self._config.hidden_size
        rows: list[tuple[range, ...]] = [(part,) for part in parts]
        if len(names) == 1:
            sizes, rows = [sum(sizes)], [row_parts(sizes, parts)]
        return {
            name: Slice((size, width), own, range(width))
            for name, size, own in zip(names, sizes, rows, strict=True)
        }

    def back(
        self,
        place: str,
        name: str,
        size: int,
        part: range,
        *,
        bias: bool,
        inputs: tuple[range, ...] = (),
        multiplier: float = 1.0,
    ) -> Linear:
        """A projection from `size`, of which a rank has `part`, to the hidden width. Rank 0 adds the bias."""
        width = self._config.hidden_size
        taken = {name: Slice((width, size), (range(width),), part)}
        bias = bias and self._shard.is_first
        return self.linear(place, taken, bias=bias, inputs=inputs, factors=factors([width], [multiplier]))

    def norm(self, name: str | None) -> Norm | None:
        return None if name is None else self.named_norm(name)

    def named_norm(self, name: str) -> Norm:
        weight = self.norm_weight(self._config.hidden_size)
        return Norm(name, weight, self._config.rms_norm_eps, self._family.norm_offset)

    def norm_weight(self, *shape: int) -> torch.Tensor:
        """A norm weight. float32 if it multiplies before the result is rounded; see `kernels.rms_norm`."""
        dtype = torch.float32 if self._family.wide_norms else self._dtype
        return torch.empty(shape, dtype=dtype, device=self._device)

    def wide(self, *shape: int) -> torch.Tensor:
        """In float32, whatever the model's dtype is."""
        return torch.empty(shape, dtype=torch.float32, device=self._device)
