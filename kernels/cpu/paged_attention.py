"""Calls the compiled attention of paged_attention.cpp, for decoding and verifying on the CPU.

The result of a row has the same bits in any batch, with any number of threads, and whether its token is
decoded alone or verified with others.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.attention_batch import AttentionBatch
from kernels.cpu import library

_ENTRY_POINTS = {
    torch.bfloat16: "quire_paged_attention_bf16",
    torch.float32: "quire_paged_attention_f32",
}
# Elements that the kernel reads at once; heads and pages consist of whole ones.
_STEP = 16
_MAX_WIDTH = 256


class _Arguments(ctypes.Structure):
    """The struct of the same name in paged_attention.cpp: the fields must agree."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("out", "query", "keys", "values", "tables", "starts", "contexts")
        ),
        *((name, ctypes.c_int64) for name in ("items", "table_stride", "query_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "width", "page_size")),
        *((name, ctypes.c_int64) for name in ("max_query", "window", "threads")),
        ("scale", ctypes.c_double),
    )


def can_attend(query: torch.Tensor, k_pages: torch.Tensor, batch: AttentionBatch) -> bool:
    """Whether the kernel takes tensors of these shapes and dtypes, and is there."""
    page_size, _, width = k_pages.shape[1:]
    return (
        query.device.type == "cpu"
        and query.dtype in _ENTRY_POINTS
        and width % _STEP == 0
        and width <= _MAX_WIDTH
        and page_size % _STEP == 0
        and batch.block_tables.device.type == "cpu"
        and library.available()
    )


def attend(
    out: torch.Tensor,
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: AttentionBatch,
    max_query_tokens: int,
    scale: float,
    sliding_window: int | None,
) -> None:
    """Attend the items of at most `max_query_tokens` tokens; `can_attend` is true.

    Mutates `out`, contiguous and shaped like query: the rows of those items that have context. All other rows
    are left as they are. Further arguments are as in `kernels.paged_attention.paged_attention`, and checked.
    """
    loaded = library.load()
    assert loaded is not None
    # Kept in variables: the kernel reads their memory. int32 tensors are not copied.
    tables = batch.block_tables.to(torch.int32)
    starts, contexts = (
        numbers.to(torch.int32).contiguous() for numbers in (batch.query_starts, batch.context_lens)
    )
    arguments = _Arguments(
        out.data_ptr(),
        query.data_ptr(),
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        tables.data_ptr(),
        starts.data_ptr(),
        contexts.data_ptr(),
        len(batch.query_lens),
        tables.stride(0),
        query.stride(0),
        query.stride(1),
        query.shape[1],
        *k_pages.shape[2:],
        k_pages.shape[1],
        max_query_tokens,
        sliding_window or 0,
        torch.get_num_threads(),
        scale,
    )
    getattr(loaded, _ENTRY_POINTS[query.dtype])(ctypes.byref(arguments))
