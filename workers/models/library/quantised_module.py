"""Turns a library's model into the reference of a quantised one, against which native code is checked.

Embeddings and projections get the dequantised weights of the format. On the CPU the inputs of projections are
rounded to bytes in groups, as in kernels/cpu/grouped_product.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations.gguf.dequant import GGML_BLOCK, dequantize

from kernels.dequantise import dequantised
from kernels.gguf_blocks import parts_of
from kernels.group_formats import GroupFormat
from kernels.grouped_weight import round_rows
from kernels.weight_formats import WeightFormat
from workers.common.gguf.header import TYPES
from workers.models.drawn_rows import scale_inputs
from workers.models.family import Family
from workers.models.parts import Part


class _Experts(nn.Module):
    """Experts with a projection for each matrix, which is a view of the library's stacked matrices."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        self.gate = nn.ModuleList()
        if not hasattr(stacked, "gate_up_proj"):
            self.apply_gate = stacked.act_fn
            self.up, self.down = (_projections(each, None) for each in (stacked.up_proj, stacked.down_proj))
            return
        self.apply_gate, self.is_concatenated = stacked._apply_gate, stacked.is_concatenated  # noqa: SLF001
        matrices = stacked.gate_up_proj, stacked.down_proj
        gate_up, down = (each.transpose(1, 2) if stacked.is_transposed else each for each in matrices)
        biases = (stacked.gate_up_proj_bias, stacked.down_proj_bias) if stacked.has_bias else (None, None)
        gates, ups = self._halves(gate_up)
        of_gates, of_ups = (None, None) if biases[0] is None else self._halves(biases[0])
        self.gate, self.up = _projections(gates, of_gates), _projections(ups, of_ups)
        self.down = _projections(down, biases[1])

    def _halves(self, outputs: torch.Tensor) -> Sequence[torch.Tensor]:
        """Splits outputs into those of gate and of up: [E, 2 * I, ...] -> [E, I, ...] twice."""
        return outputs.chunk(2, dim=1) if self.is_concatenated else (outputs[:, ::2], outputs[:, 1::2])

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, C], experts [T, k] and their weights [T, k] -> [T, C], as the library computes it."""
        total = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            token, choice = torch.where(chosen == expert)
            if not len(token):
                continue
            rows = x[token]
            inner = up(rows)  # [n, I]
            if self.gate:
                both = self.gate[expert](rows), inner
                inner = torch.cat(both, 1) if self.is_concatenated else torch.stack(both, 2).flatten(1)
            result = down(self.apply_gate(inner))
            total.index_add_(0, token, (result * weights[token, choice, None]).to(total.dtype))
        return total


def _projections(matrices: torch.Tensor, biases: torch.Tensor | None) -> nn.ModuleList:
    """[E, O, I] and [E, O] -> a projection for each expert."""
    found = nn.ModuleList()
    for expert, matrix in enumerate(matrices):
        made = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        made.weight = nn.Parameter(matrix, requires_grad=False)
        if biases is not None:
            made.bias = nn.Parameter(biases[expert], requires_grad=False)
        found.append(made)
    return found


@contextmanager
def separate_experts(module: Any, family: Family) -> Iterator[dict[str, nn.Parameter]]:
    """Inside the block, a model has a projection for each matrix of experts.

    Args:
        module: Mutated.
        family: Its family.

    Yields:
        The parameters of the model, by the names in a checkpoint.
    """
    stacked = {}
    names = family.experts
    parameters = {family.renamed_tensor(name): each for name, each in module.named_parameters()}
    for index, layer in enumerate(module.base_model.layers):
        block = next((part for part in layer.children() if hasattr(part, "experts")), None)
        if names is None or block is None:
            continue
        stacked[block] = block.experts
        block.experts = made = _Experts(block.experts)
        place = f"model.layers.{index}."
        router = next(getattr(block, name) for name in names.router.split(".") if hasattr(block, name))
        parameters[f"{place}{names.router}.weight"] = router.weight
        for name, projections in ((names.gate, made.gate), (names.up, made.up), (names.down, made.down)):
            for expert, projection in enumerate(projections):
                for kind, parameter in projection.named_parameters():
                    parameters[f"{place}{name.format(expert)}.{kind}"] = parameter
    try:
        yield parameters
    finally:
        for block, experts in stacked.items():
            block.experts = experts


@torch.inference_mode()
def put_values(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    values: Mapping[str, torch.Tensor],
    orders: Mapping[str, torch.Tensor | None],
) -> AbstractContextManager[object]:
    """Give parameters dequantised values, and let projections round their inputs.

    Returns:
        A context manager that ends the rounding.

    Args:
        module: Mutated. A model whose projections are `nn.Linear`, or routers. A tied head has the weight of
            its embedding.
        parameters: Its parameters, by the names in a checkpoint.
        values: [O, I] each, by the same names.
        orders: For parameters whose inputs are rounded, the order in which these are grouped; None: as is.
    """
    for name, matrix in values.items():
        parameters[name].copy_(matrix.view_as(parameters[name]))
    rounded = {id(parameters[name]): order for name, order in orders.items()}
    hooks = ExitStack()
    for part in module.modules():
        weight = None if isinstance(part, nn.Embedding) else getattr(part, "weight", None)
        if id(weight) in rounded:
            hook = partial(_round, order=rounded[id(weight)])
            hooks.callback(part.register_forward_pre_hook(hook).remove)
    return hooks


def values_of(form: WeightFormat, rows: Part, inputs: int) -> torch.Tensor:
    """[n, I] dequantised rows of files. Rows of GGUF files, where possible, as the library reads them."""
    if not isinstance(rows, torch.Tensor):
        return rows.dense(scale_inputs(form, inputs))
    number = next(number for number, (name, *_) in TYPES.items() if name == form.name)
    if number in GGML_BLOCK:
        return dequantize(rows.flatten(), number)
    assert isinstance(form, GroupFormat)
    return dequantised(form, parts_of(form.name, rows, inputs))


def _round(_: nn.Module, inputs: tuple[torch.Tensor], order: torch.Tensor | None) -> tuple[torch.Tensor]:
    """Round the inputs [..., I] of a projection, grouped in this order."""
    rows = inputs[0].flatten(0, -2)
    scales, values = round_rows(rows if order is None else rows[:, order])
    rounded = (scales[:, :, None] * values).flatten(1)[:, : rows.shape[1]]
    if order is not None:
        rounded = rounded[:, order.argsort()]
    return (rounded.to(rows.dtype).view_as(inputs[0]),)
