"""Deliberate mistakes in kernels.cuda.advance."""

from __future__ import annotations

from tests.kernels.cuda.mutation import Mutation

_MODULE = "kernels.cuda.advance"
_MOVES = "tests/kernels/cuda/test_advance_cuda.py::test_each_sequence_moves_on_by_one[131]"
_BEYOND = "tests/kernels/cuda/test_advance_cuda.py::test_beyond_the_table_nothing_is_written_anywhere"

MUTATIONS = [
    Mutation("padded items move on", _MODULE, "inside & (length > 0)", "inside & (length >= 0)", _MOVES),
    Mutation(
        "the slot is that of the old page",
        _MODULE,
        "position // PAGE_SIZE",
        "(position - 1) // PAGE_SIZE",
        _MOVES,
    ),
    Mutation(
        "the slot moved on to has 32 bits",
        _MODULE,
        "page.to(tl.int64) * PAGE_SIZE",
        "page * PAGE_SIZE",
        _MOVES,
    ),
    Mutation("reads beyond the table", _MODULE, "live & (column < table_pages)", "live", _BEYOND),
]
