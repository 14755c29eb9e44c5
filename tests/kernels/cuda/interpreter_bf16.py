"""bfloat16 for Triton's interpreter, which computes it wrongly without saying so.

The interpreter runs kernels in numpy, which has no bfloat16, and keeps such values as their bits in uint16.
Adding, multiplying, comparing or `tl.dot` then work on those bits as if they were integers, and casts from
float32 truncate. `install()` makes every operation on bfloat16 go through float32 and back, rounded to the
nearest with ties to even: what the hardware does. (Rounding +, -, * and / of two bfloat16 values to
float32 first is harmless, as float32 has more than twice the digits.)

Atomics on bfloat16 are not covered: they fail loudly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps, TensorHandle

Array = NDArray[Any]


def to_float32(bits: Array) -> Array:
    """The values of bfloat16 bits: uint16 -> float32, exact, any shape."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bits(values: Array) -> Array:
    """Round to bfloat16, nearest with ties to even: float32 -> its bits as uint16, any shape.

    NaN stays NaN, whatever its payload, as the canonical quiet NaN.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    # Just below half a unit is added, and one more where the last kept bit is odd. Overflow into the exponent
    # is right: it is the next power of two, or infinity.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def is_bf16(handle: Any) -> bool:
    """Whether a handle holds bfloat16 values; not those that hold the result of comparing them."""
    return bool(handle.data.dtype == np.uint16 and handle.dtype.scalar == tl.bfloat16)


def widened(handle: Any) -> Any:
    """A bfloat16 handle as float32; any other handle itself."""
    return TensorHandle(to_float32(handle.data), tl.float32) if is_bf16(handle) else handle


def narrowed(handle: Any) -> Any:
    """A float32 handle as bfloat16; any other handle itself, such as the result of a comparison."""
    if handle.dtype.scalar == tl.float32 and handle.data.dtype == np.float32:
        return TensorHandle(to_bits(handle.data), tl.bfloat16)
    return handle


def through_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the builder whose operands are of one type, and so is its result."""

    def wrapped(self: Any, *operands: Any) -> Any:
        if not any(isinstance(operand, TensorHandle) and is_bf16(operand) for operand in operands):
            return operation(self, *operands)
        wide = [widened(operand) if isinstance(operand, TensorHandle) else operand for operand in operands]
        result = operation(self, *wide)
        if result.data.dtype == np.bool_:  # A comparison: the interpreter labels it with its operands' type.
            return TensorHandle(result.data, tl.int1)
        return narrowed(result)

    return wrapped


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    """Casts between bfloat16 and anything, by way of float32."""

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        src = widened(src)
        if dst_type.scalar != tl.bfloat16:
            # A value that is float32 by now needs no cast to it: the original would do it bit by bit.
            return src if src.dtype.scalar == dst_type.scalar else original(self, src, dst_type)
        return TensorHandle(to_bits(src.data.astype(np.float32)), tl.bfloat16)

    return cast_impl


def _ternary(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.where` moves bits and needs no help; `tl.clamp` computes."""
    computing = through_float32(original)

    def ternary_op(self: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
        return (original if op is np.where else computing)(self, lhs, rhs, other, op)

    return ternary_op


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    """Products of bfloat16 are exact in float32, in which `tl.dot` accumulates."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        return original(self, widened(a), widened(b), d, *options)

    return create_dot


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions and scans are refused: a kernel that sums in bfloat16 loses digits on any device."""

    def apply_impl(self: Any, operands: Any) -> Any:
        for operand in operands:
            if operand.dtype == tl.bfloat16:
                raise TypeError("reduce bfloat16 in float32: cast it before the reduction")
        return original(self, operands)

    return apply_impl


def install() -> None:
    """Patch the interpreter of this process, once."""
    if getattr(InterpreterBuilder, "computes_bf16", False):
        return
    builder = InterpreterBuilder
    builder.cast_impl = _cast(builder.cast_impl)
    builder.binary_op = through_float32(builder.binary_op)
    builder.unary_op = through_float32(builder.unary_op)
    builder.ternary_op = _ternary(builder.ternary_op)
    builder.create_fma = through_float32(builder.create_fma)
    builder.create_rsqrt = through_float32(builder.create_rsqrt)
    builder.create_dot = _dot(builder.create_dot)
    builder.get_bf16 = lambda self, value: TensorHandle(to_bits(np.array([value], np.float32)), tl.bfloat16)
    for reduction in (ReduceOps, ScanOps):
        reduction.apply_impl = _reduction(reduction.apply_impl)
    builder.computes_bf16 = True
