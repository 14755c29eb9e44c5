"""Calls the compiled sublayers of decoder layers in sublayers.cpp: many of them in one call.

`workers/models/compiled_layers.py` describes a model's sublayers as these structures.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from typing import cast

import torch

from kernels.attention_batch import AttentionBatch
from kernels.checks import check_tensor
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.experts import ExpertLayer
from kernels.cpu.library import doubles, integers, pointers
from kernels.cpu.routing import CompiledRule
from kernels.packed_pages import PackedKeys, PackedValues, Pages
from kernels.state_rows import StateRows


class Norm(ctypes.Structure):
    """A norm, or zeros if there is none. Those of these names in sublayers.h have the same fields."""

    _fields_ = (*pointers("weight"), *integers("width wide_weight"), *doubles("eps"))


class Matrix(ctypes.Structure):
    """A matrix in parts one after the other, its bias, adapters of rows, and what multiplies outputs."""

    _fields_ = (
        *pointers("parts"),
        *integers("num_parts"),
        *pointers("bias"),
        *integers("outputs inputs"),
        *pointers("lora scales"),
    )


# By the numbers of Kind in sublayers.h.
GATED_MLP, ATTENTION, SHORT_CONV, MAMBA2, GATED_DELTA, EXPERTS = range(6)


class Mixture(ctypes.Structure):
    """Experts and how they are chosen."""

    _fields_ = (("layer", ExpertLayer), ("rule", CompiledRule), *integers("wide_router wide_weights"))


class Sublayer(ctypes.Structure):
    """Attention, a recurrent layer, a gated MLP or experts, with its norms."""

    _fields_ = (
        ("before", Norm),
        ("after", Norm),
        ("into", Matrix),
        ("out", Matrix),
        ("row_gate", Matrix),
        *doubles("scale"),
        *integers("kind activation is_beside"),
        ("head_norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        *integers("layer rope heads kv_heads width window wanted_only has_gates"),
        *doubles("attention_scale softcap"),
        *pointers("sinks taps taps_bias"),
        *integers("num_taps"),
        *pointers("weights"),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *pointers("x residual slots wanted rotations keys values"),
        *pointers("tables starts contexts roots ancestors"),
        *pointers("lora_slots given chosen"),
        *integers("has_x rows num_wanted rotary_dim num_slots page_size"),
        *integers("items table_stride threads"),
        *integers("is_quantised is_wide given_stride"),
        *pointers("states begins sources keeps"),
    )


# By the numbers of Outcome in sublayers.cpp.
_OUTCOMES: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "slots: a slot is beyond the last page"),
    2: (MemoryError, "there is not enough memory for the rows of this step"),
    3: (IndexError, "lora_slots: there is no such slot"),
    4: (IndexError, "given: there is no such expert"),
}


def _delete_with(owner: object, function: str, address: object) -> None:
    """Call a function with an address when its owner is no more; not at the exit, when it may be in use."""
    delete = library.function(function, (ctypes.c_void_p,))
    weakref.finalize(owner, delete, address).atexit = False


class LayerPages:
    """The keys and values of all layers of a model, and its recurrent states. Their memory must not move."""

    def __init__(
        self,
        layers: Sequence[tuple[Pages, Pages]],
        states: Sequence[torch.Tensor] = (),
        *,
        num_pages: int,
        page_size: int,
        are_used: bool = True,
    ) -> None:
        """Take keys and values of each layer with attention, packed if they are used.

        `states`: of each recurrent layer, [slots, ...].
        """
        self.num_pages, self.page_size = num_pages, page_size
        are_packed = all(isinstance(pages, PackedKeys | PackedValues) for layer in layers for pages in layer)
        if are_used and not are_packed:
            raise ValueError("kv: the kernels need packed pages in all layers")
        first = layers[0][0] if layers else None
        self.dtype = None if first is None else first.dtype
        self.are_quantised = isinstance(first, PackedKeys) and first.is_quantised
        self.keys, self.values = (
            (ctypes.c_void_p * len(layers))(*(layer[index].data.data_ptr() for layer in layers))
            for index in (0, 1)
        )
        self.states = (ctypes.c_void_p * len(states))(*(tensor.data_ptr() for tensor in states))


class Memory:
    """Memory for the rows of a step. It grows to what the largest step needs, and is kept."""

    @functools.cached_property
    def address(self) -> object:
        """The address of the struct. Needs compiled kernels when first used."""
        address = library.function("quire_memory_new", (), ctypes.c_void_p)()
        _delete_with(self, "quire_memory_delete", address)
        return address


class Sublayers:
    """Consecutive sublayers. Those with the same memory are not for several threads at once."""

    def __init__(
        self, all_of_them: Sequence[Sublayer], dtype: torch.dtype, memory: Memory, keep: object
    ) -> None:
        """Take a description of sublayers.

        Args:
            all_of_them: In order.
            dtype: Of rows and matrices: bfloat16 or float32.
            memory: That of the model.
            keep: Refers to the tensors whose addresses the description holds.
        """
        types = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        array = (Sublayer * len(all_of_them))(*all_of_them)
        new = library.function("quire_sublayers_new", types, ctypes.c_void_p)
        self._address = new(ctypes.addressof(array), len(array), memory.address)
        _delete_with(self, "quire_sublayers_delete", self._address)
        self._keep, self._dtype = (memory, keep), dtype
        name = f"quire_sublayers_run_{SUFFIXES[dtype]}"
        self._run = library.function(name, (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int)

    def run(  # noqa: PLR0913 - what differs between steps
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotations: Sequence[torch.Tensor],
        slots: torch.Tensor,
        wanted: torch.Tensor,
        pages: LayerPages,
        batch: AttentionBatch,
        lora_slots: torch.Tensor | None,
        *,
        state_rows: StateRows | None = None,
        given: torch.Tensor | None = None,
        chosen: torch.Tensor | None = None,
        has_x: bool,
    ) -> None:
        """Run all sublayers.

        Mutates `x`, which becomes the output of the last sublayer; `residual`, the residual stream without
        it; the slots of `pages`, and states that are kept.

        Args:
            x: [T, C] contiguous, the output of the sublayer before, if there is one: `has_x`. After the last
                attention of a model [R, C].
            residual: The residual stream, with the shape of x, contiguous.
            rotations: [T, R] float32 contiguous for each rotary embedding.
            slots: [T] int64, see `kernels.rope_kv_write`.
            wanted: [R] int64, the rows that the last attention of a model returns.
            pages: Keys and values.
            batch: Rows and pages of the items.
            lora_slots: [T] int32 contiguous, the slot of each row; -1: it has no adapter. None: no row has.
            state_rows: Of a model with recurrent layers.
            given: [T, L, k] int64, experts that all L layers with experts choose in any case; a row of -1 is
                routed. None: none are.
            chosen: [N, T, k] int64 contiguous, becomes the experts that the N of these sublayers with
                experts have chosen. None: they are not kept.
            has_x: Whether x has contents.

        Raises:
            IndexError: A slot is beyond the last page, or of no adapter: nothing is written then. Or a given
                expert does not exist.
            MemoryError: There is not enough for so many rows. Nothing is written then.
            ValueError: The numbers of rows, or a context and its page table, do not fit each other.
        """
        _check(x, slots, wanted, pages, batch, lora_slots, given, chosen)
        # Variables keep the memory alive that the kernel reads. int32 tensors are not copied.
        tables = batch.page_tables.to(torch.int32)
        starts = batch.query_starts.to(torch.int32).contiguous()
        contexts = batch.context_lens.to(torch.int32).contiguous()
        trees = batch.trees
        roots = None if trees is None else trees.roots.to(torch.int32).contiguous()
        given = None if given is None else given.contiguous()
        tables_of_rotations = (ctypes.c_void_p * len(rotations))(*map(torch.Tensor.data_ptr, rotations))
        step = _Step(
            x.data_ptr(),
            residual.data_ptr(),
            slots.data_ptr(),
            wanted.data_ptr(),
            ctypes.addressof(tables_of_rotations),
            ctypes.addressof(pages.keys),
            ctypes.addressof(pages.values),
            tables.data_ptr(),
            starts.data_ptr(),
            contexts.data_ptr(),
            None if roots is None else roots.data_ptr(),
            None if trees is None else trees.ancestors.data_ptr(),
            None if lora_slots is None else lora_slots.data_ptr(),
            None if given is None else given.data_ptr(),
            None if chosen is None else chosen.data_ptr(),
            has_x,
            len(x),
            len(wanted),
            rotations[0].shape[1] if rotations else 0,
            pages.num_pages * pages.page_size,
            pages.page_size,
            len(batch.query_lens),
            tables.stride(0),
            torch.get_num_threads(),
            pages.are_quantised,
            pages.dtype is not self._dtype,
            0 if given is None else given.stride(0),
        )
        if state_rows is not None:
            step.states = ctypes.addressof(pages.states)
            step.begins, step.sources = state_rows.begins.data_ptr(), state_rows.sources.data_ptr()
            step.keeps = state_rows.keeps.data_ptr()
        outcome = cast(int, self._run(self._address, ctypes.addressof(step)))
        if outcome != 0:
            kind, message = _OUTCOMES[outcome]
            raise kind(message)


def _check(
    x: torch.Tensor,
    slots: torch.Tensor,
    wanted: torch.Tensor,
    pages: LayerPages,
    batch: AttentionBatch,
    lora_slots: torch.Tensor | None,
    given: torch.Tensor | None,
    chosen: torch.Tensor | None,
) -> None:
    """Check that the arguments of a step fit each other. Raises ValueError or TypeError."""
    longest = max(batch.context_lens_host, default=0)
    capacity = batch.page_tables.shape[1] * pages.page_size
    fits = len(wanted) <= len(slots) == sum(batch.query_lens) and longest <= capacity
    if not fits or len(x) not in (len(slots), len(wanted)):
        raise ValueError(
            f"{len(x)} rows, {len(slots)} slots, {sum(batch.query_lens)} new tokens, {len(wanted)} wanted"
            f" rows, contexts of up to {longest} tokens and page tables of {capacity} do not fit"
        )
    if lora_slots is not None and (lora_slots.dtype is not torch.int32 or len(lora_slots) != len(x)):
        raise ValueError(f"lora_slots: must be {len(x)} of int32, got {lora_slots}")
    if given is not None:
        check_tensor("given", given, (len(x), None, None), (torch.int64,))
    if chosen is not None:
        check_tensor("chosen", chosen, (None, len(x), None), (torch.int64,))
