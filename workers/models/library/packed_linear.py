"""Projections of a library's model with packed or quantised weights: see `kernels.linear`.

A decode reads every weight once, so projections are most of its time, and only a packed product gives a row
the same bits in any batch. The packed weight replaces the plain one, in its memory, and only
`kernels.linear` can read it. If the library's code reads the weight of a layer instead of calling the layer,
the weight is unpacked and the layer becomes an ordinary one for good.

Dimension letters: I inputs; O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from kernels.linear import can_pack, linear
from kernels.packed_weight import PackedWeight
from kernels.weight import Weight


class _Packed(nn.Module):
    """A layer with a packed weight; made by `hold`."""

    _packed: Weight
    _plain_kind: type[nn.Module]
    # Whether the weight is allocated, but not read yet.
    awaits_values = False

    @property
    def weight(self) -> torch.Tensor:
        """[O, I]. Unpacks the weight, and turns the layer into an ordinary one.

        Empty while it awaits its values: then the library reads it only to initialise it, and would replace
        it by a dense one. It does so for modules of its own, such as routers, whatever their parts say.
        """
        if self.awaits_values:
            return _only_a_dtype(self)
        plain = self._packed.dense()
        if self._plain_kind is Conv1D:
            plain = plain.T.contiguous()
        self.__class__ = self._plain_kind  # type: ignore[assignment]
        del self._packed, self._plain_kind
        self.register_parameter("weight", nn.Parameter(plain, requires_grad=False))
        return plain


def values_are_there(module: nn.Module) -> None:
    """Tell the layers of a model that their weights have values. Mutates them."""
    for part in module.modules():
        if isinstance(part, _Packed):
            part.awaits_values = False


class PackedLinear(_Packed, nn.Linear):  # type: ignore[override]  # of an attribute
    """A linear layer with a packed or quantised weight."""

    _use_plain_product = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the library's name
        """[..., I] -> [..., O]."""
        if self._use_plain_product or input.dtype is not self._packed.dtype:
            return functional.linear(input, self._packed.dense(), self.bias)
        if not input.numel():
            return input.new_empty(*input.shape[:-1], self.out_features)
        rows = input.reshape(-1, self.in_features)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return linear(rows, self._packed, self.bias).view(*input.shape[:-1], self.out_features)


class PackedEmbedding(_Packed, nn.Embedding):  # type: ignore[override]  # of an attribute
    """An embedding with the packed or quantised weight of the head."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the library's name
        """[...] -> [..., C]."""
        return self._packed.rows(input.flatten()).view(*input.shape, self.embedding_dim)


@torch.inference_mode()
def pack_linears(module: nn.Module) -> None:
    """Pack the projections for whose dtype the CPU has a compiled product.

    Mutates `module`. Weights are packed in place, shared ones of an embedding and a head once. Weights with
    another use, such as an embedding that is scaled, are not packed.
    """
    users: dict[int, list[nn.Module]] = defaultdict(list)
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter.data_ptr()].append(part)
    for parts in users.values():
        if _are_packable_kinds(parts) and all(map(_can_pack, parts)):
            _pack(parts)


@contextmanager
def plain_products(module: nn.Module) -> Iterator[None]:
    """Inside the block, packed layers unpack their weight in each call, and use the library's product.

    Quantised ones do not, because the library has no product that rounds as theirs do.
    """
    layers = [
        part
        for part in module.modules()
        if isinstance(part, PackedLinear) and isinstance(part._packed, PackedWeight)  # noqa: SLF001
    ]
    for layer in layers:
        layer._use_plain_product = True  # noqa: SLF001
    try:
        yield
    finally:
        for layer in layers:
            layer._use_plain_product = False  # noqa: SLF001


def _are_packable_kinds(parts: Sequence[nn.Module]) -> bool:
    """Whether a weight belongs to a single projection, or to an embedding and a head, and nothing else."""
    # Subclasses may use the weight in another way.
    kinds = [type(part) for part in parts]
    alone = kinds in ([nn.Linear], [Conv1D])
    return alone or (len(kinds) == 2 and set(kinds) == {nn.Embedding, nn.Linear})


def _can_pack(part: Any) -> bool:
    """Whether there is a packed product for the weight, which is then used for all inputs."""
    return can_pack(part.weight) and all(each.dtype == part.weight.dtype for each in part.parameters())


def _pack(parts: Sequence[Any]) -> None:
    """Pack the weight that layers share."""
    plain = parts[0].weight.detach()
    hold(parts, PackedWeight(plain.T.contiguous() if type(parts[0]) is Conv1D else plain, in_place=True))


def hold(parts: Sequence[Any], weight: Weight) -> None:
    """Replace the weight that projections, or an embedding and its head, share by another one [O, I]."""
    for part in parts:
        del part.weight
        part._packed, part._plain_kind = weight, type(part)  # noqa: SLF001
        if type(part) is nn.Embedding:
            part.__class__ = PackedEmbedding
        elif isinstance(part, nn.Embedding):
            # A subclass also processes these rows, such as by scaling them in the dtype of its weight.
            members = {"weight": property(_only_a_dtype)}
            part.__class__ = type(type(part).__name__, (type(part), PackedEmbedding), members)
        else:
            part.__class__ = PackedLinear
            part.out_features, part.in_features = weight.shape


def _only_a_dtype(part: _Packed) -> torch.Tensor:
    """An empty tensor with the weight's dtype, which is all that an embedding that scales rows reads."""
    weight: Any = torch.empty(0, dtype=part._packed.dtype)  # noqa: SLF001 - of this module
    weight._is_hf_initialized = True  # noqa: SLF001 - else the library draws values, and looks for rows
    return weight  # type: ignore[no-any-return] # a tensor
