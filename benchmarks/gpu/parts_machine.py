"""The roof: how fast the device copies memory and multiplies matrices."""

from __future__ import annotations

import torch

from benchmarks.gpu.plan import Plan
from benchmarks.gpu.results import Roof, Row, row
from benchmarks.gpu.timing import Spread, Timer


def measure(plan: Plan, timer: Timer) -> tuple[Roof, list[Row]]:
    """Bytes read and written per second by a large copy, and operations per second of a square product."""
    copied, multiplied = _copy(plan, timer), _product(plan, timer)
    size = plan.matmul_size
    roof = Roof(
        bytes_per_s=2 * plan.copy_bytes / (copied["median"] / 1e3),
        flops_per_s=2 * size**3 / (multiplied["median"] / 1e3),
    )
    dtype = str(plan.dtype).removeprefix("torch.")
    return roof, [
        row(f"copy of {plan.copy_bytes / 1e9:.1f} GB", copied, gb_per_s=roof["bytes_per_s"] / 1e9),
        row(f"{size}^3 product, {dtype}", multiplied, tflop_per_s=roof["flops_per_s"] / 1e12),
    ]


def _copy(plan: Plan, timer: Timer) -> Spread:
    source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=plan.device)
    target = torch.empty_like(source)
    return timer.kernel(lambda: target.copy_(source))


def _product(plan: Plan, timer: Timer) -> Spread:
    # Random: on zeros the device draws less power and runs faster.
    size = plan.matmul_size
    left, right = (torch.randn(size, size, dtype=plan.dtype, device=plan.device) for _ in range(2))
    out = torch.empty_like(left)
    return timer.kernel(lambda: torch.mm(left, right, out=out))
