"""The tensors of a checkpoint in GGUF's layout: in parts, or with rows or inputs in another order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from workers.models.checkpoint import Staging, StoredTensor
from workers.models.decoder import Decoder
from workers.models.linear import Linear
from workers.models.parts import Part

# Tensors of a recurrent layer with a row for each row of a projection, in the same order.
_FOLLOWERS = {"in_proj_qkv": ("conv1d.weight",), "in_proj_a": ("dt_bias", "A_log")}


class _Reordered(StoredTensor):
    """A tensor with some rows and all inputs of another one, in any order."""

    def __init__(
        self, within: StoredTensor, rows: Sequence[int] | None, inputs: torch.Tensor | None = None
    ) -> None:
        self._within, self._inputs = within, inputs
        self._rows = range(within.shape[0]) if rows is None else rows
        self.name, self.file, self.dtype, self.begin = within.name, within.file, within.dtype, within.begin
        self.shape = len(self._rows), *within.shape[1:]
        self.nbytes = within.nbytes // math.prod(within.shape) * math.prod(self.shape)

    def parts(self, rows: range | None = None, staging: Staging | None = None) -> Iterator[tuple[int, Part]]:
        wanted, at = self._rows if rows is None else self._rows[rows.start : rows.stop], 0
        while at < len(wanted):
            end = at + 1
            while end < len(wanted) and wanted[end] == wanted[end - 1] + 1:
                end += 1
            for first, part in self._within.parts(range(wanted[at], wanted[end - 1] + 1), staging):
                assert isinstance(part, torch.Tensor), "what is quantised is not converted"
                yield at + first - wanted[at], part if self._inputs is None else part[:, self._inputs]
            at = end

    def samples(self) -> Iterator[bytes]:
        return self._within.samples()


def in_order_of_files(entries: Mapping[str, StoredTensor], decoder: Decoder) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint, and in their place or beside them those in GGUF's layout.

    Args:
        entries: The tensors of a checkpoint.
        decoder: The model, whose config has `gguf_layout`.
    """
    found = dict(entries)
    for place, projection in decoder.projections():
        if not isinstance(projection, Linear):
            continue
        for name, origin, rows in projection.origins():
            changed = [(f"{name}.{kind}", f"{origin}.{kind}") for kind in ("weight", "bias")]
            changed += [(each, each) for each in _FOLLOWERS.get(origin, ())]
            for ours, theirs in changed:
                if place + theirs in entries:
                    found[place + ours] = _Reordered(entries[place + theirs], rows)
        if projection.inputs:
            inputs = torch.tensor([one for part in projection.inputs for one in part])
            for name in projection.parts:
                weight = f"{place}{name}.weight"
                found[weight] = _Reordered(entries[weight], None, inputs)
    return found
