"""Programmatic dependent launch: a launch begins while the one before it in its stream still runs.

It saves the time between two launches, and hides what a program does before it needs the results of others.
A program waits for the end of the launch before it and then lets the next one begin, so all older launches
have ended, too. Devices without this start each launch after the end of the one before it (EARLY is false).

Before the wait a program may only fetch what it will read into the L2 cache. All multiprocessors read and
write through that one, so nothing in it can be out of date, whatever the launch before still writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The bytes of a line of the L2 cache.
LINE_BYTES = tl.constexpr(128)


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait for the end of the launch before this one, before any memory is read or written."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_rows(matrix, rows, last_row, width, first, COLUMNS: tl.constexpr):
    """Fetch COLUMNS columns from `first` on of some rows into the L2 cache.

    Not in Triton's interpreter. Nothing outside of the matrix is touched.

    Args:
        matrix: Pointer to [last_row + 1, width], contiguous.
        rows: [N]; those after the last are replaced by it.
        last_row: The last row that the matrix has.
        width: The columns of the matrix.
        first: The first column.
        COLUMNS: A power of two.
    """
    line: tl.constexpr = LINE_BYTES * 8 // matrix.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = (COLUMNS + line - 1) // line
    column = tl.minimum(first + tl.arange(0, lines) * line, width - 1)
    row = tl.minimum(rows, last_row).to(tl.int64)
    address = (matrix + row[:, None] * width + column[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )
