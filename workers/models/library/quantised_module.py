"""Turns a library's model into the plain forward of a quantised one, which proves native code.

Embeddings and projections get the weights as the format holds them, dequantised. What projections multiply is
rounded to bytes in groups, as kernels/cpu/grouped_product.h rounds it.
"""

from __future__ import annotations

import torch
from torch import nn

from kernels.group_formats import FORMATS, GroupFormat
from kernels.grouped_weight import dequantised, quantise, round_rows


@torch.inference_mode()
def quantise_module(module: nn.Module, format_name: str) -> None:
    """Mutates a model whose projections are all `nn.Linear`. A tied head keeps its embedding's weight."""
    done = set[int]()
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(_round)
        if isinstance(part, nn.Linear | nn.Embedding) and id(part.weight) not in done:
            done.add(id(part.weight))
            part.weight.copy_(_dequantised(part.weight, FORMATS[format_name]))


def _dequantised(weight: torch.Tensor, form: GroupFormat) -> torch.Tensor:
    return dequantised(form, quantise(weight, form))[:, : weight.shape[1]]


def _round(_: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """The inputs [..., I] of a projection."""
    rows = inputs[0].flatten(0, -2)
    scales, values = round_rows(rows)
    rounded = (scales[:, :, None] * values).flatten(1)[:, : rows.shape[1]]
    return (rounded.to(rows.dtype).view_as(inputs[0]),)
