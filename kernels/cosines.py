"""Cosines and sines with the same bits on every CPU: torch's depend on its vectors, and on MKL.

Each operation is one that IEEE 754 rounds, on one number after the other, in float64. Errors are below 1e-15,
so nearly all results are the float32 that is nearest to the exact one.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

# pi / 2 in three parts: products of the first two with up to 2^23 quarter turns are exact.
_PARTS_OF_QUARTER = (0x3243F6A8 / 2**29, 0x22168C23 / 2**59, float.fromhex("0x1.313198a2e037p-61"))
# Coefficients of the Taylor series, highest power first. On [-pi / 4, pi / 4] further terms are below 5e-17.
_OF_SINE = [float(Fraction((-1) ** n, math.factorial(2 * n + 1))) for n in range(8, -1, -1)]
_OF_COSINE = [float(Fraction((-1) ** n, math.factorial(2 * n))) for n in range(8, -1, -1)]


def cosines_and_sines(of_angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles in radians, float32 on the CPU, of up to 2^23: new tensors of float64."""
    angles = of_angles.double()
    quarters = (angles * (2 / math.pi)).round_()
    for of_quarter in _PARTS_OF_QUARTER:
        angles.sub_(quarters * of_quarter)
    square = angles * angles
    cosine, sine = _series(_OF_COSINE, square), _series(_OF_SINE, square).mul_(angles)
    place = quarters.int().bitwise_and_(3)
    is_odd = (place & 1).bool()
    cosines, sines = torch.where(is_odd, sine, cosine), torch.where(is_odd, cosine, sine)
    # Plus and minus 1.
    return cosines.mul_(1 - (place + 1 & 2)), sines.mul_(1 - (place & 2))


def _series(coefficients: list[float], x: torch.Tensor) -> torch.Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total
