"""Projections of a library's model with packed weights: see `kernels.linear`.

A decode reads every weight once, so projections are most of its time. The packed weight replaces the plain
one, in its memory, and only `kernels.linear` can read it. If the library's code reads the weight of a layer
instead of calling the layer, the weight is unpacked and the layer becomes an ordinary one for good.

Dimension letters: I inputs; O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from kernels.linear import can_pack, linear
from kernels.packed_weight import PackedWeight

# The packed layout has blocks of 16 outputs and 32 inputs: smaller weights would grow.
_MIN_SIZE = 32


class PackedLinear(nn.Linear):
    """A linear layer with a packed weight; made by `pack_linears`."""

    _packed: PackedWeight
    _use_plain_product: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the library's name
        """[..., I] -> [..., O]."""
        if self._use_plain_product or input.dtype is not self._packed.dtype:
            return functional.linear(input, self._packed.to_dense(), self.bias)
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        rows = input.reshape(-1, self.in_features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return linear(rows, self._packed, self.bias).view(*input.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]  # an attribute of ordinary layers
        """[O, I]. Unpacks the weight, and turns the layer into an ordinary one."""
        plain = self._packed.to_dense()
        del self._packed, self._use_plain_product
        self.__class__ = nn.Linear  # type: ignore[assignment]
        self.register_parameter("weight", nn.Parameter(plain, requires_grad=False))
        return plain


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Pack the projections that are faster packed: those for which the CPU has a compiled product.

    Mutates `module`. Weights are packed in place. Weights with another use, such as tied embeddings, are not
    packed.
    """
    uses = Counter(
        parameter.data_ptr() for part in module.modules() for parameter in part.parameters(recurse=False)
    )
    for part in module.modules():
        # Subclasses may use the weight in another way.
        if type(part) is nn.Linear and uses[part.weight.data_ptr()] == 1 and _is_worth_packing(part):
            _pack(part)


@contextmanager
def plain_products(module: nn.Module) -> Iterator[None]:
    """Inside the block, packed layers unpack their weight in each call, and multiply as the library does."""
    layers = [part for part in module.modules() if isinstance(part, PackedLinear)]
    for layer in layers:
        layer._use_plain_product = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._use_plain_product = False  # noqa: SLF001


def _is_worth_packing(layer: nn.Linear) -> bool:
    """Whether the packed weight is faster, of about the same size, and used for all inputs."""
    return (
        can_pack(layer.weight)
        and min(layer.in_features, layer.out_features) >= _MIN_SIZE
        and all(parameter.dtype == layer.weight.dtype for parameter in layer.parameters())
    )


def _pack(layer: nn.Linear) -> None:
    packed = PackedWeight(layer.weight.detach(), in_place=True)
    del layer.weight
    layer.__class__ = PackedLinear
    assert isinstance(layer, PackedLinear)
    layer._packed, layer._use_plain_product = packed, False  # noqa: SLF001
