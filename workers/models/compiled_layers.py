"""Runs consecutive sublayers on the CPU in one compiled call, where kernels exist for all their parts."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Protocol

import torch

from kernels.cpu import sublayers
from kernels.cpu.linear import MatrixPart
from kernels.gated_activation import ACTIVATIONS
from kernels.lora import LoraTable
from kernels.lora_pairs import SortedRows
from kernels.packed_pages import can_pack_width
from kernels.rope import RopeSpec
from workers.kv.tensors import KvTensors
from workers.models.experts import Experts, WithSharedExpert
from workers.models.layers import (
    Attention,
    Body,
    ForwardContext,
    GatedMlp,
    Norm,
    Projected,
    Sublayer,
    parts_of,
)
from workers.models.linear import Linear
from workers.models.recurrent_layers import GatedDelta, Mamba2, RecurrentMixer, ShortConv


class Stage(Protocol):
    """Runs one or several consecutive sublayers."""

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext, /
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Sublayer`. If the output is None, it was added to the residual stream."""


def compiled(model: Sequence[Sublayer], ropes: Sequence[RopeSpec], memory: sublayers.Memory) -> list[Stage]:
    """Sublayers as stages. Consecutive ones that can be compiled become one stage.

    In a group each sublayer is its own stage, because the ranks sum between them.

    Args:
        model: Consecutive sublayers, packed.
        ropes: The rotary embeddings of the model.
        memory: The scratch memory of the model.
    """
    stages: list[Stage] = []
    for can, group in groupby(model, _can_compile):
        members = list(group)
        if not can:
            stages += members
        elif members[0].group is None:
            stages.append(CompiledSublayers(members, ropes, memory))
        else:
            stages += [_CompiledPart(member, ropes, memory) for member in members]
    return stages


class _CompiledPart:
    """The `Stage` of a rank's sublayer: one compiled call up to the sum over the ranks."""

    def __init__(self, sublayer: Sublayer, ropes: Sequence[RopeSpec], memory: sublayers.Memory) -> None:
        self._sublayer = sublayer
        before = Sublayer(sublayer.before, sublayer.body, None, 1.0)
        self._compiled = CompiledSublayers([before], ropes, memory)

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = self._compiled(x, residual, context)
        return self._sublayer.leave(x), residual


class CompiledSublayers:
    """Consecutive sublayers in one compiled call. The results have the same bits as separate calls."""

    def __init__(
        self, model: Sequence[Sublayer], ropes: Sequence[RopeSpec], memory: sublayers.Memory
    ) -> None:
        """`model`: packed sublayers for which there are kernels."""
        keep: list[object] = [model]
        described = [each for one in model for each in _described(one, ropes, keep)]
        bodies = [body for one in model for body in parts_of(one.body)]
        self._sublayers = sublayers.Sublayers(described, _dtype(bodies[0]), memory, keep)
        self._ropes = tuple(ropes)
        self._kv: weakref.ref[KvTensors] | None = None
        # If there are no kernels for the head width, only MLPs are compiled, and pages are not packed.
        self._uses_pages = any(isinstance(body, Attention) for body in bodies)
        self._returns_wanted = isinstance(bodies[-1], Projected) and bodies[-1].is_last
        self._experts = [body for body in bodies if isinstance(body, Experts)]

    def __call__(
        self, x: torch.Tensor | None, residual: torch.Tensor, context: ForwardContext, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs all sublayers. Mutates `x` and `residual`."""
        inputs = context.inputs
        assert not isinstance(context.lora_slots, SortedRows), "these are slots on the CPU"
        if self._kv is None or self._kv() is not context.kv:
            self._kv = weakref.ref(context.kv)
            layers = [context.kv.layer(index) for index in range(len(context.kv.layers))]
            states = () if context.kv.states is None else context.kv.states.tensors
            self._pages = sublayers.LayerPages(
                layers,
                states,
                num_pages=context.kv.num_pages,
                page_size=context.kv.page_size,
                are_used=self._uses_pages,
            )
        has_x = x is not None
        if x is None:
            x = torch.empty_like(residual)
        routing, chosen = context.routing, None
        if routing is not None and routing.found is not None and self._experts:
            shape = len(self._experts), len(x), self._experts[0].per_token
            chosen = torch.empty(shape, dtype=torch.int64)
        self._sublayers.run(
            x,
            residual,
            [*map(context.rotations.__getitem__, self._ropes)],
            inputs.slots,
            inputs.wanted_rows,
            self._pages,
            inputs.attention,
            context.lora_slots,
            state_rows=context.states,
            given=None if routing is None else routing.given,
            chosen=chosen,
            has_x=has_x,
        )
        if routing is not None and chosen is not None:
            for of_layer in chosen:
                routing.note(of_layer)
        return x[: len(inputs.wanted_rows)] if self._returns_wanted else x, residual


def _can_compile(sublayer: Sublayer) -> bool:
    is_split, gate = sublayer.group is not None, _gate_of(sublayer.body)
    if gate is not None and gate.weight.compiled is None:
        return False
    return all(_can_compile_body(body, is_split=is_split) for body in parts_of(sublayer.body))


def _dtype(body: Body) -> torch.dtype:
    assert isinstance(body, Experts | Projected)
    return body.dtype if isinstance(body, Experts) else body.into.weight.dtype


def _gate_of(body: Body) -> Linear | None:
    """The gate of a shared expert. None: there is none."""
    return body.gate if isinstance(body, WithSharedExpert) else None


def _can_compile_body(body: Body, *, is_split: bool) -> bool:
    if isinstance(body, Experts):
        return body.can_compile
    return (
        isinstance(body, Attention | ShortConv | Mamba2 | GatedDelta | GatedMlp)
        and not (isinstance(body, RecurrentMixer) and body.within)
        # In a group these norms need the other ranks in the middle of the sublayer.
        and not (is_split and isinstance(body, Attention) and body.row_norms is not None)
        and not (isinstance(body, Mamba2) and body.norm_group is not None)
        and all(matrix.weight.compiled is not None for matrix in (body.into, body.output))
        and (not isinstance(body, Attention) or can_pack_width(body.config.head_dim))
    )


def _described(
    sublayer: Sublayer, ropes: Sequence[RopeSpec], keep: list[object]
) -> Iterator[sublayers.Sublayer]:
    """Describes a sublayer's parts for the kernel. `keep`: receives the objects that must stay alive."""
    parts, gate = parts_of(sublayer.body), _gate_of(sublayer.body)
    for body in parts:
        found = _of_body(body, ropes, keep)
        found.before, found.is_beside, found.scale = _norm(sublayer.before), body is not parts[0], 1.0
        if body is parts[-1]:
            found.after, found.scale = _norm(sublayer.after), sublayer.scale
        if gate is not None and isinstance(body, GatedMlp):
            found.row_gate = _matrix(gate, keep)
        yield found


def _of_body(body: Body, ropes: Sequence[RopeSpec], keep: list[object]) -> sublayers.Sublayer:
    if isinstance(body, Experts):
        return _of_experts(body, keep)
    assert isinstance(body, Projected)
    found = sublayers.Sublayer(rope=-1, wanted_only=body.is_last)
    found.into, found.out = _matrix(body.into, keep), _matrix(body.output, keep)
    if isinstance(body, GatedMlp):
        found.activation = ACTIVATIONS.index(body.activation)
    elif isinstance(body, Attention):
        _describe_attention(found, body, ropes)
    else:
        assert isinstance(body, ShortConv | Mamba2 | GatedDelta)
        _describe_recurrent(found, body, keep)
    return found


def _of_experts(body: Experts, keep: list[object]) -> sublayers.Sublayer:
    mixture, into = body.compiled(), _matrix(body.router, keep)
    keep.append(mixture)
    found = sublayers.Sublayer(rope=-1, kind=sublayers.EXPERTS, layer=body.index, into=into)
    found.out.outputs, found.weights = into.inputs, ctypes.addressof(mixture)
    return found


def _describe_recurrent(
    found: sublayers.Sublayer, body: ShortConv | Mamba2 | GatedDelta, keep: list[object]
) -> None:
    found.layer = body.states.start
    if isinstance(body, ShortConv):
        found.kind, found.num_taps = sublayers.SHORT_CONV, len(body.taps)
        found.taps = body.taps.data_ptr()
        found.taps_bias = None if body.bias is None else body.bias.data_ptr()
        return
    found.kind = sublayers.MAMBA2 if isinstance(body, Mamba2) else sublayers.GATED_DELTA
    weights = body.weights.compiled()
    keep.append(weights)
    found.weights = ctypes.addressof(weights)


def _describe_attention(found: sublayers.Sublayer, body: Attention, ropes: Sequence[RopeSpec]) -> None:
    found.kind, found.layer = sublayers.ATTENTION, body.index
    config, layer, shard = body.config, body.layer, body.shard
    found.heads, found.kv_heads, found.width = len(shard.heads), len(shard.kv_heads), config.head_dim
    found.attention_scale, found.softcap = config.attention_scale, config.attention_softcap or 0.0
    found.window, found.has_gates = layer.window or 0, config.family.gated_attention
    found.sinks = None if body.sinks is None else body.sinks.data_ptr()
    if layer.rope is not None:
        found.rope = ropes.index(layer.rope)
    eps = config.rms_norm_eps
    if body.head_norm is not None:
        found.head_norm = _norm_of(body.head_norm, eps)
    if body.row_norms is not None:
        found.query_norm, found.key_norm = (_norm_of(weight, eps) for weight in body.row_norms)


def _norm(norm: Norm | None) -> sublayers.Norm:
    return sublayers.Norm() if norm is None else _norm_of(norm.weight, norm.eps)


def _norm_of(weight: torch.Tensor, eps: float) -> sublayers.Norm:
    return sublayers.Norm(weight.data_ptr(), weight.shape[-1], weight.dtype is torch.float32, eps)


def _matrix(linear: Linear, keep: list[object]) -> sublayers.Matrix:
    bias = None if linear.bias is None else linear.bias.data_ptr()
    lora = linear.lora.address if isinstance(linear.lora, LoraTable) else None
    compiled = linear.weight.compiled
    assert compiled is not None
    parts = (MatrixPart * len(compiled))(*(MatrixPart(*part) for part in compiled))
    keep.append(parts)
    scales = None if linear.scales is None else linear.scales.data_ptr()
    return sublayers.Matrix(ctypes.addressof(parts), len(parts), bias, *linear.weight.shape, lora, scales)
