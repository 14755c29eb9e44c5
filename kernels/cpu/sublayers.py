"""Calls the compiled sublayers of decoder layers in sublayers.cpp: many of them in one call.

`workers/models/compiled_layers.py` describes a model's sublayers as these structures.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention_batch import AttentionBatch
from kernels.cpu import library


def _fields(kind: type, *names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names)


class Norm(ctypes.Structure):
    """A norm, or zeros if there is none. The structures of this name and the next in sublayers.cpp agree."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "weight"),
        *_fields(ctypes.c_int64, "width", "wide_weight"),
        *_fields(ctypes.c_double, "eps"),
    )


class Matrix(ctypes.Structure):
    """A packed matrix and its bias."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "weight", "bias"),
        *_fields(ctypes.c_int64, "outputs", "inputs"),
    )


class Sublayer(ctypes.Structure):
    """Attention or a gated MLP, with its norms."""

    _fields_ = (
        *_fields(Norm, "before", "after"),
        *_fields(Matrix, "into", "out"),
        *_fields(ctypes.c_double, "scale"),
        *_fields(ctypes.c_int64, "is_attention", "activation"),
        *_fields(Norm, "head_norm", "query_norm", "key_norm"),
        *_fields(ctypes.c_int64, "layer", "rope", "heads", "kv_heads", "width", "window", "wanted_only"),
        *_fields(ctypes.c_double, "attention_scale", "softcap"),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "x", "residual", "slots", "wanted", "rotations", "keys", "values"),
        *_fields(ctypes.c_void_p, "tables", "starts", "contexts", "roots", "ancestors"),
        *_fields(ctypes.c_int64, "has_x", "rows", "num_wanted", "rotary_dim", "num_slots", "page_size"),
        *_fields(ctypes.c_int64, "items", "table_stride", "threads"),
    )


Pages = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Sublayers:
    """Consecutive sublayers. Not for several threads at once."""

    def __init__(self, all_of_them: Sequence[Sublayer], dtype: torch.dtype, keep: object) -> None:
        """Take a description of sublayers.

        Args:
            all_of_them: In order.
            dtype: Of rows and matrices: bfloat16 or float32.
            keep: Refers to the tensors whose addresses the description holds.
        """
        types = (ctypes.c_void_p, ctypes.c_int64)
        array = (Sublayer * len(all_of_them))(*all_of_them)
        new = library.function("quire_sublayers_new", types, ctypes.c_void_p)
        delete = library.function("quire_sublayers_delete", (ctypes.c_void_p,))
        self._address: Any = new(ctypes.addressof(array), len(array))
        self._keep = keep
        name = f"quire_sublayers_run_{library.SUFFIXES[dtype]}"
        self._run = library.function(name, (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_bool)
        weakref.finalize(self, delete, self._address)

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        rotations: Sequence[torch.Tensor],
        slots: torch.Tensor,
        wanted: torch.Tensor,
        pages: Pages,
        batch: AttentionBatch,
        *,
        has_x: bool,
    ) -> None:
        """Run all sublayers.

        Mutates `x`, which becomes the output of the last sublayer; `residual`, the residual stream without
        it; and the slots of `pages`.

        Args:
            x: [T, C] contiguous, the output of the sublayer before, if there is one: `has_x`.
            residual: [T, C] contiguous.
            rotations: [T, R] float32 contiguous for each rotary embedding.
            slots: [T] int64, see `kernels.rope_kv_write`.
            wanted: [R] int64, the rows that the last attention of a model returns.
            pages: Keys and values of each layer of the model, [pages, S, K, D] contiguous.
            batch: Rows and pages of the items.
            has_x: Whether x has contents.

        Raises:
            IndexError: A slot is beyond the last page. Nothing is written then.
        """
        # Variables keep the memory alive that the kernel reads. int32 tensors are not copied.
        tables, starts, contexts = (
            numbers.to(torch.int32).contiguous()
            for numbers in (batch.page_tables, batch.query_starts, batch.context_lens)
        )
        trees = batch.trees
        roots = None if trees is None else trees.roots.to(torch.int32).contiguous()
        arrays = [
            (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
            for tensors in (rotations, [keys for keys, _ in pages], [values for _, values in pages])
        ]
        step = _Step(
            x.data_ptr(),
            residual.data_ptr(),
            slots.data_ptr(),
            wanted.data_ptr(),
            *(ctypes.addressof(array) for array in arrays),
            tables.data_ptr(),
            starts.data_ptr(),
            contexts.data_ptr(),
            None if roots is None else roots.data_ptr(),
            None if trees is None else trees.ancestors.data_ptr(),
            has_x,
            len(x),
            len(wanted),
            rotations[0].shape[1] if rotations else 0,
            pages[0][0].shape[0] * pages[0][0].shape[1],
            pages[0][0].shape[1],
            len(batch.query_lens),
            tables.stride(0),
            torch.get_num_threads(),
        )
        if not self._run(self._address, ctypes.addressof(step)):
            raise IndexError("slots: a slot is beyond the last page")
