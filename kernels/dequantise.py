"""The numbers that the parts of quantised rows stand for, as the formats define them.

Dimension letters: n rows; I inputs; G groups; H groups, or half groups where these have scales.
"""

from __future__ import annotations

import torch

from kernels.group_formats import TABLES, GroupFormat
from kernels.group_layout import Parts

_MOST_HALF = 15


def factors(form: GroupFormat, parts: Parts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [n, H] in float32, exact, and minima [n, H], or None."""
    groups = parts.values.shape[1] * max(form.subscales, 1)
    of_a_scale = form.span * max(form.subscales, 1)

    def spread(of_scales: torch.Tensor) -> torch.Tensor:
        return of_scales.float().repeat_interleave(of_a_scale, dim=1)[:, :groups]

    scales, minima = spread(parts.scales), None if parts.minima is None else spread(parts.minima)
    subscales, subminima = parts.subscales, parts.subminima
    if form.packs_subscales:
        assert subscales is not None
        both = subscales.view(torch.uint8)
        subscales, subminima = both & _MOST_HALF, both >> 4
    if subscales is not None:
        scales *= subscales
    if minima is not None and subminima is not None:
        minima *= -subminima.float()
    return scales, minima


def integers(form: GroupFormat, parts: Parts) -> torch.Tensor:
    """What scales are multiplied by: [n, G, 32] float32, all of them integers."""
    values = parts.values.int()
    values = torch.tensor(TABLES[form.table])[values] if form.table else values - form.offset
    if parts.zeros is not None:
        values -= parts.zeros.repeat_interleave(form.span, dim=1)[:, : values.shape[1], None]
    return values.float()


def dequantised(form: GroupFormat, parts: Parts) -> torch.Tensor:
    """The weights [n, I] in float32, as the formats define them; I is filled up to whole groups."""
    scales, minima = factors(form, parts)
    shape = len(scales), scales.shape[1], -1
    found = integers(form, parts).view(shape) * scales[:, :, None]
    return (found if minima is None else found + minima[:, :, None]).flatten(1)
