"""Attention of a mixed batch on the GPU: chooses the kernel for each item.

The first items of one token run in the decode kernel, which splits the keys of long ones by a work list.
Batches have decodes first. All other items run in the prefill kernel, which supports single tokens and trees
too. If bits must not depend on the batch, all items do: the parts of the decode kernel depend on it, and its
sums have another order.

No launch depends on the lengths of contexts, neither on the device nor on the host, so a CUDA graph that was
captured with short contexts is correct for long ones.

Dimension letters: T tokens; N items; H query heads; D width of a key; V width of a value; S tokens per page.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from kernels.attention_batch import AttentionBatch
from kernels.attention_scoring import Scoring
from kernels.cuda.decode_attention import config_for, decode_attention
from kernels.cuda.decode_plan import DecodePlan, num_units_for, plan_units
from kernels.cuda.prefill_attention import prefill_attention
from kernels.cuda.variant import SHARED_BYTES
from kernels.packed_pages import LeadingValues


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The properties of a device that launches depend on: multiprocessors, and shared memory per program."""

    multiprocessors: int
    shared_bytes: int


@cache
def limits_of(device: torch.device) -> DeviceLimits:
    """The limits of a device; without a GPU, in Triton's interpreter, those of an H100 or H200."""
    if device.type != "cuda":
        return DeviceLimits(132, SHARED_BYTES[90])
    # The limits that Triton checks at a launch.
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return DeviceLimits(properties["multiprocessor_count"], properties["max_shared_mem"])


def paged_attention(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | LeadingValues,
    batch: AttentionBatch,
    scoring: Scoring,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The attention of every item, with arguments as in `kernels.paged_attention.paged_attention`, checked.

    `query` may have any strides but the last, which is 1; S is a power of two, and rows of page tables are
    contiguous. Returns a new tensor [T, H, V] of its dtype, in which items without context have zeros.

    Without `batch_invariant` the bits of an item's rows depend on how many items of one token come first, on
    their lengths and on the width of the page tables, which decide the parts, but on nothing in the others.
    """
    shape = (*query.shape[:2], v_pages.shape[3])
    out = torch.empty(shape, dtype=query.dtype, device=query.device)  # [T, H, V]
    limits = limits_of(query.device)
    items = len(batch.query_lens)
    page_size = k_pages.shape[1]
    trees = batch.trees
    others = (item for item, length in enumerate(batch.query_lens) if length != 1)
    decodes = 0 if batch_invariant else next(others, items)
    if trees is not None:
        decodes = min(decodes, next(item for item, is_tree in enumerate(trees.is_tree) if is_tree))
    if decodes:
        in_keys = isinstance(v_pages, LeadingValues)
        config = config_for(query.dtype, max(query.shape[2], v_pages.shape[3]), in_keys=in_keys)
        programs = config.parts_of_heads(query.shape[1], k_pages.shape[2], in_keys=in_keys)
        capacity = batch.page_tables.shape[1] * page_size
        longest = min(capacity, scoring.sliding_window or capacity)
        units = num_units_for(decodes, programs, longest, limits.multiprocessors)
        decode_attention(
            out[:decodes],
            query[:decodes],
            k_pages,
            v_pages,
            batch.page_tables[:decodes],
            batch.context_lens[:decodes],
            scoring,
            _plan(batch, decodes, units, scoring.sliding_window, config.tile, programs),
        )
    if decodes < items:
        prefill_attention(
            out[decodes:],
            query[decodes:],
            k_pages,
            v_pages,
            batch.page_tables[decodes:],
            batch.query_starts[decodes:],
            batch.context_lens[decodes:],
            scoring,
            limits.shared_bytes,
            None if trees is None else trees.after(decodes),
            batch_invariant=batch_invariant,
        )
    return out


def _plan(
    batch: AttentionBatch, decodes: int, units: int, sliding_window: int | None, tile: int, kv_heads: int
) -> DecodePlan | None:
    """The work list of the first items, which the first layer with this window makes for all of them."""
    if units == decodes:
        return None
    key = decodes, units, sliding_window, tile, kv_heads
    plan: DecodePlan | None = batch.plans.get(key)
    if plan is None:
        plan = plan_units(batch.context_lens[:decodes], units, sliding_window, tile, kv_heads)
        batch.plans[key] = plan
    return plan
