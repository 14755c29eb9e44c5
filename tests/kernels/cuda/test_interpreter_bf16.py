# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The interpreter computes bfloat16 as torch does, once it has been patched."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from tests.kernels.cuda import interpreter_bf16

# Ties to even and odd, just above and below a tie, the largest finite value and beyond, a subnormal, zeros.
EDGES = [1.00390625, 1.01171875, 1.0039064, 1.0039062, 3.3895e38, 3.4e38, float("inf"), 1e-40, 0.0, -0.0]


@triton.jit
def _cast_kernel(wide, narrow, back, n: tl.constexpr):
    at = tl.arange(0, n)
    rounded = tl.load(wide + at).to(tl.bfloat16)
    tl.store(narrow + at, rounded)
    tl.store(back + at, rounded.to(tl.float32))


@triton.jit
def _compute_kernel(a, b, out, n: tl.constexpr):
    at = tl.arange(0, n)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, x + y)
    tl.store(out + n + at, x - y)
    tl.store(out + 2 * n + at, x * y)
    tl.store(out + 3 * n + at, -x)
    tl.store(out + 4 * n + at, tl.where(x < y, x, y))
    tl.store(out + 5 * n + at, tl.abs(x))
    tl.store(out + 6 * n + at, tl.maximum(x, 1.0))
    tl.store(out + 7 * n + at, tl.full((n,), 1.5, tl.bfloat16) + x)


@triton.jit
def _dot_kernel(a, b, out, n: tl.constexpr):
    at = tl.arange(0, n)[:, None] * n + tl.arange(0, n)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def _sum_kernel(a, out, n: tl.constexpr):
    tl.store(out, tl.sum(tl.load(a + tl.arange(0, n)), 0))


@pytest.fixture(autouse=True)
def _only_interpreted(device: str) -> None:
    if device != "cpu":
        pytest.skip("about the interpreter")


def test_casts_round_to_nearest_even() -> None:
    random = torch.randn(1 << 14) * torch.logspace(-38, 38, 1 << 14)
    wide = torch.cat([torch.tensor(EDGES), -torch.tensor(EDGES), random])[: 1 << 14]
    narrow, back = torch.empty(1 << 14, dtype=torch.bfloat16), torch.empty(1 << 14)
    _cast_kernel[(1,)](wide, narrow, back, 1 << 14)
    assert torch.equal(narrow.view(torch.int16), wide.bfloat16().view(torch.int16))
    assert torch.equal(back, wide.bfloat16().float())


def test_nan_stays_nan() -> None:
    # The payload of the second one would be rounded up into the sign, the last one's would be cut off.
    bits = torch.tensor([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)
    narrow, back = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)
    _cast_kernel[(1,)](bits.view(torch.float32), narrow, back, 4)
    assert narrow.isnan().all() and back.isnan().all()


def test_arithmetic_and_comparisons_as_torch() -> None:
    a, b = torch.randn(2, 1024).bfloat16()
    out = torch.empty(8, 1024, dtype=torch.bfloat16)
    _compute_kernel[(1,)](a, b, out, 1024)
    expected = [a + b, a - b, a * b, -a, torch.minimum(a, b), a.abs(), a.clamp(min=1.0), a + 1.5]
    for row, want in zip(out, expected, strict=True):
        assert torch.equal(row, want)


def test_products_of_matrices_are_float32() -> None:
    a, b = torch.randn(2, 32, 32).bfloat16()
    out = torch.empty(32, 32)
    _dot_kernel[(1,)](a, b, out, 32)
    assert (out.double() - a.double() @ b.double()).abs().max() < 1e-5


def test_a_sum_in_bfloat16_is_refused() -> None:
    with pytest.raises(Exception, match="reduce bfloat16 in float32"):
        _sum_kernel[(1,)](torch.ones(8).bfloat16(), torch.ones(1).bfloat16(), 8)


def test_installing_twice_changes_nothing() -> None:
    before = InterpreterBuilder.binary_op
    interpreter_bf16.install()
    assert InterpreterBuilder.binary_op is before
