# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, PLR0917
"""Kernels with the faults that the compile gate has to find, and one without.

Dimension letters: M rows; L keys of a tile; D head width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.compile_spec import CompileSpec, Expectations, Variant
from kernels.cuda.dependent_launch import wait


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


def _attention(name: str, rows: int, *, ahead: bool, expects: Expectations) -> CompileSpec:
    pointers = {"out": "*bf16", "query": "*bf16", "k_slots": "*bf16", "table": "*i32"}
    constexprs = {"M": rows, "L": 64, "D": 128, "AHEAD": ahead}
    return CompileSpec(
        Variant(attention_kernel, constexprs, num_warps=4, num_stages=3),
        name,
        pointers | {"length": "i32"},
        divisible_by_16=tuple(pointers),
        expects=expects,
        architectures=(90,),
    )


def compile_specs() -> list[CompileSpec]:
    """Named by the fault that has to be found."""
    pipelined = Expectations(kv_buffers=2)
    pointers = dict.fromkeys(("out", "a", "b"), "*fp32")

    def product(size: int, name: str, types: dict[str, str]) -> CompileSpec:
        variant = Variant(spilling_kernel, {"N": size}, num_warps=1, num_stages=1)
        return CompileSpec(variant, name, types, divisible_by_16=tuple(types), architectures=(90,))

    copy = Variant(waiting_kernel, {}, num_warps=4, num_stages=1, early=True)
    copied, fetches = {"out": "*fp32", "a": "*fp32"}, Expectations(fetches=True)
    return [
        CompileSpec(copy, "fetches nothing", copied, expects=fetches, architectures=(90,)),
        _attention("well", 16, ahead=True, expects=pipelined),
        _attention("one buffer", 16, ahead=False, expects=pipelined),
        _attention("no wgmma", 16, ahead=True, expects=Expectations(wgmma=True)),
        _attention("too much shared memory", 16, ahead=True, expects=Expectations(max_shared_bytes=1024)),
        product(64, "spills", pointers),
        product(64, "signature", {"out": "*fp32"}),
        product(100, "does not compile", pointers),  # tl.arange needs a power of two
    ]
