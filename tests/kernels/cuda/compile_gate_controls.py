# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, PLR0917
"""Kernels with the faults that the compile gate has to find, and one without.

Dimension letters: M rows; L keys of a tile; D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from benchmarks.gpu.launches import Launch, Pointer
from kernels.cuda.dependent_launch import wait
from kernels.cuda.variant import Variant
from tests.kernels.cuda.shipped import Case, Expectations


@triton.jit
def spilling_kernel(out, a, b, N: tl.constexpr):
    """A product whose operands and result are too much for the registers of one warp."""
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left, right = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.dot(left, right) + left * right)


@triton.jit
def waiting_kernel(out, a, EARLY: tl.constexpr):
    """A copy that asks for nothing before it waits."""
    wait(EARLY)
    tl.store(out + tl.arange(0, 128), tl.load(a + tl.arange(0, 128)))


@triton.jit
def attention_kernel(
    out, query, k_slots, table, length, M: tl.constexpr, L: tl.constexpr, D: tl.constexpr, AHEAD: tl.constexpr
):
    """Attention in outline. Without AHEAD, slots are loaded in the iteration that loads their keys."""
    columns = tl.arange(0, D)
    at = tl.arange(0, M)[:, None] * D + columns[None, :]
    rows = tl.load(query + at)
    result = tl.zeros([M, D], tl.float32)
    ahead = tl.load(table + tl.arange(0, L)).to(tl.int64)
    for start in range(0, length, L):
        if AHEAD:
            slots = ahead
            ahead = tl.load(table + start + L + tl.arange(0, L)).to(tl.int64)
        else:
            slots = tl.load(table + start + tl.arange(0, L)).to(tl.int64)
        keys = tl.load(k_slots + slots[:, None] * D + columns[None, :])  # [L, D]
        scores = tl.dot(rows, tl.trans(keys))  # [M, L]
        values = tl.load(k_slots + (slots[:, None] + L) * D + columns[None, :])  # [L, D]
        result = tl.dot(tl.exp2(scores).to(values.dtype), values, result)
    tl.store(out + at, result.to(out.dtype.element_ty))


def _case(
    name: str, variant: Variant, arguments: Sequence[str | None], expects: Expectations | None = None
) -> Case:
    """For sm_90. `arguments`: the dtypes of tensors; None: a number."""
    launch = Launch(
        __name__,
        variant.kernel.fn.__name__,
        tuple(17 if dtype is None else Pointer(dtype, True) for dtype in arguments),
        tuple(variant.constexprs_of(90).items()),
        tuple(variant.options_of(90).items()),
    )
    return Case(name, launch, 90, expects or Expectations())


def _attention(name: str, *, ahead: bool = True, expects: Expectations | None = None) -> Case:
    constexprs = {"M": 16, "L": 64, "D": 128, "AHEAD": ahead}
    variant = Variant(attention_kernel, constexprs, num_warps=4, num_stages=3)
    arguments = ("bfloat16", "bfloat16", "bfloat16", "int32", None)
    return _case(name, variant, arguments, expects or Expectations(kv_buffers=2))


def _product(name: str, size: int) -> Case:
    return _case(name, Variant(spilling_kernel, {"N": size}, num_warps=1, num_stages=1), ["float32"] * 3)


def cases(_: object) -> list[Case]:
    """Named by the fault that has to be found."""
    copy = Variant(waiting_kernel, {}, num_warps=4, num_stages=1, early=True)
    return [
        _case("fetches nothing", copy, ["float32"] * 2, Expectations(fetches=True)),
        _attention("well"),
        _attention("one buffer", ahead=False),
        _attention("no wgmma", expects=Expectations(wgmma=True)),
        _attention("too much shared memory", expects=Expectations(max_shared_bytes=1024)),
        _product("spills", 64),
        _product("does not compile", 100),  # tl.arange needs a power of two
    ]
