"""Projections of a library's model whose weights are laid out for the matrix library: see `kernels.linear`.

A decode reads every weight once, so this is most of its time. The packed weight replaces the plain one, layer
by layer, and nothing but our product can read it. Code of the library that reads the weight of a layer
itself, rather than calling the layer, gets a plain one: that layer is an ordinary one from then on.

Dimension letters: I inputs; O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from kernels.linear import can_pack, linear, pack_weight
from workers.models.library.freed_memory import FreedMemory

# The packed layout consists of blocks of so many outputs: a router of eight experts would grow eightfold.
_LEAST_SIZE = 64


class PackedLinear(nn.Linear):
    """A layer of the library that was taken over; `pack_linears` makes them."""

    _packed: torch.Tensor
    _multiplies_plainly: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the library's name
        """[..., I] -> [..., O]."""
        if self._multiplies_plainly or input.dtype is not self._packed.dtype:
            return functional.linear(input, self._packed.to_dense(), self.bias)
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        rows = input.reshape(-1, self.in_features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return linear(rows, self._packed, self.bias).view(*input.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # an attribute of ordinary layers
        """[O, I], plain and held from now on, in the place of the packed one."""
        plain = self._packed.to_dense()
        del self._packed, self._multiplies_plainly
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(plain, requires_grad=False))
        return plain


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Take over the projections of a model that gain from it: those in bfloat16 on the CPU.

    Mutates `module`: weights are packed one after the other, so that all are in memory once, and one twice.
    Weights that are also used otherwise, such as tied embeddings, stay as they are.
    """
    uses = Counter(id(parameter) for part in module.modules() for parameter in part.parameters(recurse=False))
    freed = FreedMemory()
    for part in module.modules():
        # Classes that derive from it may do something else with the weight.
        if type(part) is nn.Linear and uses[id(part.weight)] == 1 and _gains(part):
            freed.add(part.weight.nbytes)
            _pack(part)


@contextmanager
def plain_products(module: nn.Module) -> Iterator[None]:
    """Let packed layers unpack their weight in each call, for a while, and multiply as the library does."""
    layers = [part for part in module.modules() if isinstance(part, PackedLinear)]
    for layer in layers:
        layer._multiplies_plainly = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._multiplies_plainly = False  # noqa: SLF001


def _gains(layer: nn.Linear) -> bool:
    """Whether the packed weight is faster, of the same size, and multiplies the same rows."""
    return (
        can_pack(layer.weight)
        and min(layer.in_features, layer.out_features) >= _LEAST_SIZE
        and all(parameter.dtype == layer.weight.dtype for parameter in layer.parameters())
    )


def _pack(layer: nn.Linear) -> None:
    packed = pack_weight(layer.weight.detach())
    del layer.weight
    layer.__class__ = PackedLinear
    assert isinstance(layer, PackedLinear)
    layer._packed, layer._multiplies_plainly = packed, False  # noqa: SLF001
