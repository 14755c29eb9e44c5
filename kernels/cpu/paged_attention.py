"""Calls the compiled attention in attention.cpp.

A row of the result has the same bits in any batch, with any number of threads, and whether its token is alone
or one of many new ones.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.attention_batch import AttentionBatch
from kernels.attention_scoring import Scoring
from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.cpu.library import doubles, integers, pointers
from kernels.packed_pages import LeadingValues, PackedKeys, PackedValues


class _Arguments(ctypes.Structure):
    """AttentionArguments of attention_arguments.h: the fields must agree."""

    _fields_ = (
        *pointers("out query keys values tables starts contexts sinks slopes roots ancestors"),
        *integers("items table_stride query_stride head_stride heads kv_heads width value_width page_size"),
        *integers("window is_quantised is_wide"),
        *doubles("scale softcap"),
    )


def attend(
    out: torch.Tensor,
    query: torch.Tensor,
    k_pages: PackedKeys,
    v_pages: PackedValues | LeadingValues,
    batch: AttentionBatch,
    scoring: Scoring,
) -> None:
    """Mutates `out`, [T, H, V] contiguous: writes the rows of all but padding items.

    The other arguments are as in `kernels.paged_attention.paged_attention`, and checked.
    """
    # Variables keep the memory alive that the kernel reads. int32 tensors are not copied.
    tables = batch.page_tables.to(torch.int32)
    starts = batch.query_starts.to(torch.int32).contiguous()
    contexts = batch.context_lens.to(torch.int32).contiguous()
    trees = batch.trees
    roots = None if trees is None else trees.roots.to(torch.int32).contiguous()
    arguments = _Arguments(
        out.data_ptr(),
        query.data_ptr(),
        k_pages.data.data_ptr(),
        None if isinstance(v_pages, LeadingValues) else v_pages.data.data_ptr(),
        tables.data_ptr(),
        starts.data_ptr(),
        contexts.data_ptr(),
        None if scoring.sinks is None else scoring.sinks.data_ptr(),
        None if scoring.alibi_slopes is None else scoring.alibi_slopes.data_ptr(),
        None if roots is None else roots.data_ptr(),
        None if trees is None else trees.ancestors.data_ptr(),
        len(batch.query_lens),
        tables.stride(0),
        query.stride(0),
        query.stride(1),
        query.shape[1],
        *k_pages.shape[2:],
        v_pages.shape[3],
        k_pages.shape[1],
        scoring.sliding_window or 0,
        k_pages.is_quantised,
        k_pages.dtype is not query.dtype,
        scoring.scale,
        scoring.softcap or 0.0,
    )
    name = f"quire_paged_attention_{SUFFIXES[k_pages.dtype]}"
    run = library.function(name, (ctypes.c_void_p, ctypes.c_int64))
    run(ctypes.addressof(arguments), torch.get_num_threads())
