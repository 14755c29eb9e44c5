"""Turns a library's model into the plain forward of a quantised one, which proves native code.

Embeddings and projections get the weights as the format holds them, dequantised. What projections multiply is
rounded to bytes in groups, as kernels/cpu/grouped_product.h rounds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import nn
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from kernels.dequantise import dequantised
from kernels.float8_weight import Float8Format
from kernels.gguf_blocks import parts_of
from kernels.group_formats import GroupFormat
from kernels.grouped_weight import round_rows
from kernels.quantisers import quantise
from kernels.weight_formats import WeightFormat
from workers.common.gguf.header import TYPES
from workers.models.builder import FormatOf
from workers.models.parts import Part
from workers.models.quantised.drawn_rows import scale_inputs


@torch.inference_mode()
def quantise_module(module: nn.Module, format_of: FormatOf) -> None:
    """Mutates a model whose projections are all `nn.Linear`. A tied head keeps its embedding's weight."""
    done = set[int]()
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(_round)
        if isinstance(part, nn.Linear | nn.Embedding) and id(part.weight) not in done:
            done.add(id(part.weight))
            form = format_of(f"{name}.weight")
            assert isinstance(form, GroupFormat)
            part.weight.copy_(_dequantised(part.weight, form))


@torch.inference_mode()
def put_blocks(
    module: nn.Module, blocks: Mapping[str, tuple[WeightFormat, Part]]
) -> AbstractContextManager[object]:
    """Give parameters the values of quantised rows; of GGUF files, where it can, as the library reads them.

    Returns:
        What ends the rounding of that which they multiply.

    Args:
        module: Mutated: a model whose projections are all `nn.Linear`.
        blocks: The format of each matrix, and its rows as files have them; by the names of parameters.
    """
    orders: dict[int, torch.Tensor | None] = {}
    for name, (form, rows) in blocks.items():
        parameter = module.get_parameter(name)
        parameter.copy_(_values(form, rows, parameter.shape[1]).view_as(parameter))
        if not isinstance(form, Float8Format):
            orders[id(parameter)] = getattr(rows, "order", None)
    hooks = ExitStack()
    for part in module.modules():
        if isinstance(part, nn.Linear) and id(part.weight) in orders:
            hook = partial(_round, order=orders[id(part.weight)])
            hooks.callback(part.register_forward_pre_hook(hook).remove)
    return hooks


def _values(form: WeightFormat, rows: Part, inputs: int) -> torch.Tensor:
    if not isinstance(rows, torch.Tensor):
        return rows.dense(scale_inputs(form, inputs))
    return _values_of_blocks(form, rows, inputs)


def _values_of_blocks(form: WeightFormat, raw: torch.Tensor, inputs: int) -> torch.Tensor:
    assert isinstance(form, GroupFormat)
    number = next(number for number, (name, *_) in TYPES.items() if name == form.name)
    if number in GGML_BLOCK:
        return dequantize(raw.flatten(), number)
    return dequantised(form, parts_of(form.name, raw, inputs))


def _dequantised(weight: torch.Tensor, form: GroupFormat) -> torch.Tensor:
    return dequantised(form, quantise(weight, form))[:, : weight.shape[1]]


def _round(
    _: nn.Module, inputs: tuple[torch.Tensor], order: torch.Tensor | None = None
) -> tuple[torch.Tensor]:
    """The inputs [..., I] of a projection, in groups of this order."""
    rows = inputs[0].flatten(0, -2)
    scales, values = round_rows(rows if order is None else rows[:, order])
    rounded = (scales[:, :, None] * values).flatten(1)[:, : rows.shape[1]]
    if order is not None:
        rounded = rounded[:, order.argsort()]
    return (rounded.to(rows.dtype).view_as(inputs[0]),)
