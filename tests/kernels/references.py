"""Operations in float64, written as plainly as possible, and what may differ from them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def assert_close(actual: torch.Tensor, exact: torch.Tensor, relative: float = 0.0) -> None:
    """Check a result against its float64 value.

    Allowed is twice what rounding the exact value to the dtype costs, plus 1e-6 for the float32 accumulation
    inside; and `relative` of the largest value, for what the operation is known to lose beside that.
    """
    assert exact.dtype == torch.float64
    assert torch.isfinite(actual).all(), "not finite"
    floor = (exact.to(actual.dtype).double() - exact).abs().max().item()
    error = (actual.double() - exact).abs().max().item()
    allowed = 2 * (floor + 1e-6) + relative * exact.abs().max().item()
    assert error <= allowed, f"error {error} of {allowed}, rounding alone costs {floor}"


def angle_loss(largest: float) -> float:
    """What angles up to `largest`, in float32, cost a rotation at most, relative to the largest value.

    An angle is off by half a unit in its last place, and the pair (a, b) by that times its length, which is
    at most sqrt(2) of the largest element.
    """
    last_place: float = 2.0 ** (math.ceil(math.log2(largest)) - 24)
    return last_place / 2 * math.sqrt(2)


def activated64(gate: torch.Tensor, activation: str) -> torch.Tensor:
    """The activation of a gate in float64, from its definition."""
    x = gate.double()
    if activation == "clamped_swiglu":
        limited = x.clamp(max=7.0)
        return limited * torch.sigmoid(1.702 * limited)
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "gelu":
        return x / 2 * torch.erfc(-x / math.sqrt(2))
    # (1 + tanh(y)) / 2 as a sigmoid, which is exact where the tangent is almost -1.
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def factor64(up: torch.Tensor, activation: str) -> torch.Tensor:
    """What an activation is multiplied by, in float64."""
    return up.double().clamp(-7.0, 7.0) + 1 if activation == "clamped_swiglu" else up.double()


def gate_loss(gate: torch.Tensor, activation: str = "silu") -> float:
    """What an activation and a product cost in float32 at most, relative to each value.

    In units of 2^-24: exp is off by its argument times what that was rounded by, and by 4; the quotient by 4;
    the sum in it and the product by 1 each. The argument is x itself for silu, rounded once. For gelu_tanh it
    is a polynomial, rounded in 4 products, their 3 constants and a sum. For gelu it is x^2 / 2, rounded in 2
    products and a constant, and exp is followed by a polynomial that is off by 5, and two more products. For
    clamped_swiglu it is 1.702 x, rounded in a product and a constant, and up is rounded in a sum.
    """
    largest = gate.abs().max().item()
    if activation == "silu":
        lost = largest + 10
    elif activation == "clamped_swiglu":
        lost = 2 * 1.702 * largest + 11
    elif activation == "gelu":
        lost = 3 * largest**2 / 2 + 17
    else:
        lost = 8 * 2 * math.sqrt(2 / math.pi) * (largest + 0.044715 * largest**3) + 10
    return lost * 2**-24


def norm_loss(width: int) -> float:
    """What RMSNorm in float32 costs at most, relative to each value, in whatever order squares are summed.

    A square is rounded once and a sum of `width` of them at most `width` times, each by 2^-24 of it; the root
    halves that. Mean, epsilon, root, reciprocal and the two products are rounded once each, or twice.
    """
    return (width / 2 + 8) * 2**-24


def rms_norm64(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm in float64."""
    wide = x.double()
    return weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rotate64(x: torch.Tensor, positions: Sequence[int], frequencies: Sequence[float]) -> torch.Tensor:
    """Rotate-half RoPE in float64, pair by pair."""
    out = x.double().clone()
    half = x.shape[2] // 2
    for row, position in enumerate(positions):
        for pair in range(half):
            cos, sin = math.cos(position * frequencies[pair]), math.sin(position * frequencies[pair])
            first, second = x[row, :, pair].double(), x[row, :, pair + half].double()
            out[row, :, pair] = first * cos - second * sin
            out[row, :, pair + half] = second * cos + first * sin
    return out


def experts64(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activation: str,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A mixture of experts in float64, pair by pair, and what each element may be off by.

    The bound is carried along with the values: a product of n terms loses n * 2^-24 of the sum of their sizes
    in float32, and what its arguments are off by; each result is rounded to the dtype of x; an activation
    has a slope of 1.2 at most, and loses what `gate_loss` says.
    """
    unit = torch.finfo(x.dtype).eps / 2

    def product(
        rows: torch.Tensor, off: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        wide, terms = matrix.double(), len(matrix.T)
        exact = rows @ wide.T
        if bias is not None:
            exact, terms = exact + bias.double(), terms + 1
        lost = (terms * 2**-24 * rows.abs() + (1 + unit) * off) @ wide.abs().T
        if bias is not None:
            lost += 2**-24 * bias.double().abs()
        return exact, lost + unit * (exact.abs() + lost)

    out, allowed = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    for token, chosen in enumerate(expert_ids.tolist()):
        for choice, expert in enumerate(chosen):
            own = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            both, off = product(x[token].double(), torch.zeros(x.shape[1]).double(), gate_up[expert], own[0])
            (gate, up), (gate_off, up_off) = both.chunk(2), off.chunk(2)
            activated = activated64(gate, activation)
            activated_off = 1.2 * gate_off + (unit + gate_loss(gate, activation)) * (
                activated.abs() + 1.2 * gate_off
            )
            factor = factor64(up, activation)
            inner = activated * factor
            inner_off = activated_off * (factor.abs() + up_off) + activated.abs() * up_off
            inner_off += unit * (inner.abs() + inner_off)
            result, result_off = product(inner, inner_off, down[expert], own[1])
            weight = expert_weights[token, choice].double()
            out[token] += weight * result
            allowed[token] += weight.abs() * (result_off + (len(chosen) + 1) * 2**-24 * result.abs())
    return out, allowed + unit * (out.abs() + allowed)
