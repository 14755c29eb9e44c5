"""Quantises rows to formats of GGUF.

"q8_0", "q4_0" and "q5_0" have the values that the reference code of GGUF makes: the scale of a group follows
from its largest number. The others are searched for, as llama.cpp does it in principle:

1. For each group with a minimum some scales are tried that are near the obvious one. The values to which
   each rounds the group have a scale and a minimum with the least squares, in closed form; of all these the
   best are taken. Squares are weighted by the root of the mean square of the group, plus the number's size.
   Formats without minima have a scale for each half of a group, and weigh squares by the number's square.
2. The largest scale and the lowest minimum of a super-block determine those in floating point, and the others
   become integers beside them.
3. Numbers are rounded once more, with what the scales and minima are then.

kernels/cpu/quantise.cpp has the same, with the same bits.

Dimension letters: n rows; I inputs; G groups; S scales of a row; H groups, or half groups where these have
scales; P super-blocks.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from kernels.cpu import library
from kernels.cpu.dtypes import SUFFIXES
from kernels.dequantise import factors
from kernels.group_formats import GROUP_INPUTS, GroupFormat
from kernels.group_layout import Parts

QUANTISERS = ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
"""The formats to which rows can be quantised."""

# As in kernels/cpu/quantise.cpp.
_TRIES_WITH_MINIMUM, _TRIES_OF_HALF, _TRY_STEP = 21, 19, 0.1
_LANES = 16
# The largest integers beside the scales of a super-block, and beside its minima.
_MOST_BESIDE, _LEAST_BESIDE_HALVES = 63, -128


def quantise(rows: torch.Tensor, form: GroupFormat) -> Parts:
    """Quantise rows [n, I]; the last group of each is filled up with zeros.

    Returns:
        Their parts. A scale is not finite if a number of its group is not, or is too large for the format.

    Raises:
        TypeError: The format is none of `QUANTISERS`.
    """
    if form.name not in QUANTISERS:
        raise TypeError(f"nothing quantises to {form.name}")
    rows = rows if rows.dtype in SUFFIXES else rows.float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    values = torch.empty(len(rows), -(-rows.shape[1] // GROUP_INPUTS), GROUP_INPUTS, dtype=torch.uint8)
    if form.subscales == 0:
        return Parts(values, _quantise(values, rows, form).half())
    parts = _with_integers(values, form, *_search_factors(rows, form, values.shape[1]))
    _round_values(parts, rows, form)
    return parts


def _with_integers(
    values: torch.Tensor, form: GroupFormat, scales: torch.Tensor, minima: torch.Tensor | None
) -> Parts:
    """The parts of rows whose values are not known yet, from scales and minima [n, H]."""
    if minima is None:
        # The largest becomes -128, of which there is one more than of 127.
        whole, beside = _shared(scales, form, _LEAST_BESIDE_HALVES, -1 - _LEAST_BESIDE_HALVES)
        return Parts(values, whole, subscales=beside)
    whole, beside = _shared(scales, form, _MOST_BESIDE, _MOST_BESIDE)
    whole_minima, beside_minima = _shared(-minima, form, _MOST_BESIDE, _MOST_BESIDE)
    return Parts(values, whole, whole_minima, subscales=beside, subminima=beside_minima)


def _shared(
    wanted: torch.Tensor, form: GroupFormat, integer_of_largest: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What super-blocks share of numbers [n, H]: [n, S] float16; and the integers beside it, [n, H] int8."""
    each = form.span * form.subscales
    blocks = functional.pad(wanted, (0, -wanted.shape[1] % each)).view(len(wanted), -1, each)  # [n, P, each]
    largest = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))  # NaN, if there is one
    shared = (largest / integer_of_largest).half()
    inverse = torch.where(shared == 0, 0.0, shared.float().reciprocal())
    integers = (blocks * inverse).round().clamp(-most - 1, most).nan_to_num(0.0)
    return shared[:, :, 0], integers.flatten(1)[:, : wanted.shape[1]].to(torch.int8)


def _quantise(values: torch.Tensor, rows: torch.Tensor, form: GroupFormat) -> torch.Tensor:
    """Fills the values of formats whose scales are not searched for. Returns scales [n, G] in float32."""
    scales = torch.empty(values.shape[:2])
    if library.available():
        _run("quantise", rows, form, values, scales)
        return scales
    groups, middle = in_groups(rows), 1 << form.bits - 1
    if form.bits == 8:
        scales = groups.abs().amax(2) / 127
        scaled = groups * _inverse(scales)
        # Halves are rounded away from zero.
        whole = scaled.trunc()
        whole += ((scaled - whole).abs() >= 0.5) * scaled.sign()
        values.copy_(whole.add_(middle))
    else:
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))[:, :, 0]
        scales = largest / -middle
        values.copy_((groups * _inverse(scales)).add_(middle + 0.5).clamp_(max=2 * middle - 1))
    return scales


def _search_factors(
    rows: torch.Tensor, form: GroupFormat, groups: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [n, H] and minima [n, H], or None; in float32."""
    scales = torch.empty(len(rows), groups * form.subscales)
    minima = torch.empty_like(scales) if form.minima else None
    if library.available():
        _run("search_factors", rows, form, scales, minima)
        return scales, minima
    if form.minima:
        return _searched_with_minima(in_groups(rows), (1 << form.bits) - 1)
    return _searched(in_groups(rows).view(len(rows), -1, _LANES), form.offset), None


def _searched_with_minima(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of groups [n, G, 32], for values from 0 to `levels`."""
    squares = _sums(x * x)
    low = x.amin(2).clamp(max=0.0)
    size = x.amax(2) - low
    # In float64, since torch's root in float32 may be off by a bit.
    weights = (squares / GROUP_INPUTS).double().sqrt().float()[:, :, None] + x.abs()
    weighted = weights * x
    sum_w, sum_x = _sums(weights), _sums(weighted)
    scales, minima, most = size / levels, low, torch.full_like(low, -1.0)
    for step in torch.arange(_TRIES_WITH_MINIMUM, dtype=torch.float32) * _TRY_STEP:
        inverse = (levels - 1 + step) / size
        values = _whole((x - low[:, :, None]) * inverse[:, :, None] + 0.5, levels)
        sum_l, sum_xl = _sums(weights * values), _sums(weighted * values)
        sum_ll = _sums(weights * values * values)
        # The scale and the minimum with the least squares.
        determinant = sum_w * sum_ll - sum_l * sum_l
        best_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        best_minimum = (sum_ll * sum_x - sum_l * sum_xl) / determinant
        is_above = best_minimum > 0
        best_scale = torch.where(is_above, sum_xl / sum_ll, best_scale)
        best_minimum = torch.where(is_above, 0.0, best_minimum)
        # What the squares become less by.
        gain = best_scale * sum_xl + best_minimum * sum_x
        is_better = (size > 0) & (determinant > 0) & (best_scale > 0) & (gain > most)
        scales, most = torch.where(is_better, best_scale, scales), torch.where(is_better, gain, most)
        minima = torch.where(is_better, best_minimum, minima)
    is_finite = squares.isfinite()
    return torch.where(is_finite, scales, torch.nan), torch.where(is_finite, minima, 0.0)


def _searched(x: torch.Tensor, levels: int) -> torch.Tensor:
    """Scales of half groups [n, H, 16], for values from -levels to levels - 1. They may be negative."""
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    scaled = x / largest
    weights = scaled * scaled
    scales = torch.full(x.shape[:2], -1.0 / levels)
    most = torch.zeros_like(scales)
    for step in torch.arange(_TRIES_OF_HALF, dtype=torch.float32) - _TRIES_OF_HALF // 2:
        values = _whole(scaled * -(levels + step * _TRY_STEP) + (levels + 0.5), 2 * levels - 1) - levels
        sum_yl, sum_ll = _sums(weights * scaled * values), _sums(weights * values * values)
        best = sum_yl / sum_ll
        gain = best * sum_yl
        is_better = (sum_ll > 0) & (gain > most)
        scales, most = torch.where(is_better, best, scales), torch.where(is_better, gain, most)
    largest = largest[:, :, 0]
    found = torch.where(largest == 0, 0.0, largest * scales)
    return torch.where(_sums(x * x).isfinite(), found, torch.nan)


def _round_values(parts: Parts, rows: torch.Tensor, form: GroupFormat) -> None:
    """Fills the values of parts that have all else."""
    scales, minima = factors(form, parts)  # [n, H]
    if library.available():
        _run("round_values", rows, form, parts.values, scales, minima)
        return
    x = in_groups(rows).view(*scales.shape, -1)
    x = x if minima is None else x - minima[:, :, None]
    rounded = _whole(x * _inverse(scales) + (form.offset + 0.5), (1 << form.bits) - 1)
    parts.values.copy_(rounded.view_as(parts.values))


def _run(
    name: str, rows: torch.Tensor, form: GroupFormat, first: torch.Tensor, *further: torch.Tensor | None
) -> None:
    """Call a compiled function, which fills tensors or reads them."""
    made = [None if one is None else one.contiguous() for one in (first, *further)]
    pointers = [None if one is None else one.data_ptr() for one in made]
    types = *[ctypes.c_void_p] * (len(pointers) + 2), *[ctypes.c_int64] * 4
    run = library.function(f"quire_{name}_{SUFFIXES[rows.dtype]}", types)
    run(*pointers, form.address, rows.data_ptr(), rows.stride(0), *rows.shape, torch.get_num_threads())


def in_groups(rows: torch.Tensor) -> torch.Tensor:
    """Rows [n, I] as float32, the last group filled up with zeros: [n, G, 32]."""
    count, inputs = rows.shape
    filled = functional.pad(rows.float(), (0, -inputs % GROUP_INPUTS))
    return filled.view(count, -(-inputs // GROUP_INPUTS), GROUP_INPUTS)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, scale.reciprocal())[:, :, None]


def _whole(x: torch.Tensor, most: int) -> torch.Tensor:
    """Rounded down, and from 0 to `most`. NaN becomes 0."""
    return x.nan_to_num(0.0).clamp(0, most).floor()


def _sums(x: torch.Tensor) -> torch.Tensor:
    """[n, H, 32 or 16] -> [n, H]: the halves are added, then the halves of that, and so on."""
    while x.shape[2] > 1:
        half = x.shape[2] // 2
        x = x[:, :, :half] + x[:, :, half:]
    return x[:, :, 0]
