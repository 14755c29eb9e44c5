"""Work lists of decode attention: which part of which item each of its programs reads.

Items differ in length, but the grid of a launch in a CUDA graph is fixed. So a launch has a number of *units*
that depends on shapes alone, and the device distributes the keys of all items over them, in each step anew.
An item has one unit, or several if it is longer than a unit's share; its parts are of equal size. Units that
are left over have no item. A long item among short ones is so read by many programs, as it would be alone.

All layers of a step with the same window have the same list, and count in the same memory which parts of an
item have been written: the last one adds them up. It sets the count back to zero, for the next layer.

Dimension letters: N items; U units; K key-value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.cuda.variant import Variant

# The number of programs that run on a multiprocessor at once, limited by their shared memory.
PROGRAMS_A_MULTIPROCESSOR = 3
# With fewer keys in a part, starting it and adding its result would take most of the time.
MIN_PART_KEYS = 128
# Items, and units, that are looked at at once.
BLOCK = 64


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """A work list, on the device.

    Attributes:
        first_units: [N + 1] int32, the first unit of each item, and the number of units that have an item.
        unit_items: [U] int32, the item of each unit; N: none.
        arrived: [K, U] int32, for each item (of the first N) how many of its parts have been written in a
            launch that runs; else 0.
    """

    first_units: torch.Tensor
    unit_items: torch.Tensor
    arrived: torch.Tensor


def num_units_for(batch: int, kv_heads: int, max_context: int, multiprocessors: int) -> int:
    """The number of units of a launch, each of which is a program for each key-value head.

    As many as run on the device at once, and two for each item, so that items above the mean can be divided
    in any batch. No more than there can be parts.

    Args:
        batch: The number of items, padding items included.
        kv_heads: The number of key-value heads.
        max_context: The most tokens of an item.
        multiprocessors: The number of multiprocessors of the device.

    Returns:
        `batch` or more. If it is `batch`, no item is divided.
    """
    at_once = PROGRAMS_A_MULTIPROCESSOR * multiprocessors // kv_heads
    most = batch * max(1, -(-max_context // MIN_PART_KEYS))
    return max(batch, min(max(at_once, 2 * batch), most))


@triton.jit
def tiles_of(context_lens, at, inside, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The tiles of keys of some items."""
    keys = tl.load(context_lens + at, mask=inside, other=0).to(tl.int32)
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW)
    return (keys + TILE - 1) // TILE


@triton.jit
def parts_of(tiles, inside, share):
    """How many parts items of so many tiles have; none where there is no item."""
    return tl.where(inside, tl.maximum((tiles + share - 1) // share, 1), 0)


# Slices of a batch begin at any address, and batches have any size.
@triton.jit(do_not_specialize=["items", "units", "kv_heads"], do_not_specialize_on_alignment=["context_lens"])
def plan_kernel(
    first_units,  # [N + 1]
    unit_items,  # [U]
    arrived,  # [K, U]
    context_lens,  # [N]
    items,
    units,  # more than items
    kv_heads,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    MIN_TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK units. The first program also writes where each item begins."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    least = tl.zeros([BLOCK], tl.int64)
    for first in range(0, items, BLOCK):
        inside = first + lanes < items
        tiles = tiles_of(context_lens, first + lanes, inside, WINDOW, TILE)
        total += tiles
        least += parts_of(tiles, inside, MIN_TILES)
    # N parts, and one more for each share: no more than U in all. The smallest, if there are units for them.
    room = (units - items).to(tl.int64)
    share = tl.maximum((tl.sum(total, 0) + room - 1) // room, MIN_TILES).to(tl.int32)
    share = tl.where(tl.sum(least, 0) <= units, MIN_TILES, share)

    mine = tl.program_id(0) * BLOCK + lanes  # [BLOCK] units
    before = tl.zeros([BLOCK], tl.int32)  # items that end before each of them
    begin = 0
    for first in range(0, items, BLOCK):
        inside = first + lanes < items
        parts = parts_of(tiles_of(context_lens, first + lanes, inside, WINDOW, TILE), inside, share)
        ends = begin + tl.cumsum(parts, 0)
        if tl.program_id(0) == 0:
            tl.store(first_units + first + lanes, ends - parts, mask=inside)
        ended = (ends[:, None] <= mine[None, :]) & inside[:, None]
        before += tl.sum(ended.to(tl.int32), 0)
        begin += tl.sum(parts, 0)
    if tl.program_id(0) == 0:
        tl.store(first_units + items, begin)
    tl.store(unit_items + mine, before, mask=mine < units)
    for head in range(kv_heads):
        tl.store(arrived + head * units + mine, 0, mask=mine < units)


@cache
def _variant(window: int, tile: int, min_tiles: int) -> Variant:
    constexprs = {"WINDOW": window, "TILE": tile, "MIN_TILES": min_tiles, "BLOCK": BLOCK}
    return Variant(plan_kernel, constexprs, num_warps=4, num_stages=1)


def plan_units(
    context_lens: torch.Tensor, units: int, sliding_window: int | None, tile: int, kv_heads: int
) -> DecodePlan:
    """The work list of a step.

    Checks nothing, reads nothing back, and launches what follows from the shapes and `units` alone, so that
    it can be captured in a CUDA graph.

    Args:
        context_lens: [N] int32 or int64; 0: a padded item, which has one unit.
        units: U, more than N.
        sliding_window: The number of positions that a token attends to; None: all.
        tile: The number of keys that are read at once.
        kv_heads: K.
    """
    items, device = len(context_lens), context_lens.device
    first_units = torch.empty(items + 1, dtype=torch.int32, device=device)
    unit_items = torch.empty(units, dtype=torch.int32, device=device)
    arrived = torch.empty(kv_heads, units, dtype=torch.int32, device=device)
    grid = (triton.cdiv(units, BLOCK),)
    variant = _variant(sliding_window or 0, tile, max(1, MIN_PART_KEYS // tile))
    variant.launch(grid, first_units, unit_items, arrived, context_lens, items, units, kv_heads)
    return DecodePlan(first_units, unit_items, arrived)
