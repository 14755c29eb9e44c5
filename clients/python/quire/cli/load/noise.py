"""Confidence bounds of figures, from a block bootstrap over time slices of a run.

Values that are close in time are correlated. So whole slices are resampled with replacement, and the figure
is computed for each resample; 95% of the results are between the bounds. The bounds estimate the variation
within a run, not that between runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SLICES = 20
_DRAWS = 400
_BOUNDS = (2.5, 97.5)
# Latencies are resampled as histograms with classes that differ by 1%, from 1 microsecond on.
_SMALLEST_S, _GROWTH = 1e-6, 1.01


@dataclass(frozen=True, slots=True)
class Slices:
    """The slices of a window of time, in seconds."""

    begin_s: float
    end_s: float

    def of(self, times_s: Floats) -> npt.NDArray[np.int64]:
        """The number of the slice that each time is in, from 0 to SLICES - 1."""
        width_s = (self.end_s - self.begin_s) / SLICES
        found = np.floor((times_s - self.begin_s) / width_s) if width_s > 0 else np.zeros(len(times_s))
        return np.clip(found, 0, SLICES - 1).astype(np.int64)

    @property
    def seconds_each(self) -> float:
        return (self.end_s - self.begin_s) / SLICES


@functools.cache
def _drawn_counts() -> Floats:
    """How often each slice is in each resample, [draws, slices]. Deterministic."""
    draws = np.random.default_rng(0)
    return draws.multinomial(SLICES, np.full(SLICES, 1 / SLICES), size=_DRAWS).astype(np.float64)


def _bounds(found: Floats) -> tuple[float, float]:
    low, high = np.nanpercentile(found, _BOUNDS)
    return float(low), float(high)


def rate_bounds(per_slice: Floats, seconds_each: float) -> tuple[float, float]:
    """Bounds of a rate per second, from the counts of the slices."""
    return _bounds(_drawn_counts() @ per_slice / (SLICES * seconds_each))


def quantile_bounds(
    values_s: Floats, slice_of: npt.NDArray[np.int64], quantile: float
) -> tuple[float, float] | None:
    """Bounds of a quantile (0 to 1) of values, each in a slice. None: too little data."""
    return _resampled(values_s, slice_of, lambda sums, classes_s: _quantiles(sums, classes_s, quantile))


def mean_bounds(values_s: Floats, slice_of: npt.NDArray[np.int64]) -> tuple[float, float] | None:
    """Bounds of the mean of values, each in a slice. None: too little data."""
    return _resampled(values_s, slice_of, lambda sums, classes_s: sums @ classes_s / sums.sum(axis=1))


def _resampled(
    values_s: Floats, slice_of: npt.NDArray[np.int64], figure: Callable[[Floats, Floats], Floats]
) -> tuple[float, float] | None:
    """Bounds of a figure of counts, [draws, classes], and of the values of the classes, [classes]."""
    # With values in few slices, the bounds would be too narrow.
    if len(np.unique(slice_of)) < SLICES // 4:
        return None
    logs = np.log(np.maximum(values_s, _SMALLEST_S) / _SMALLEST_S) / np.log(_GROWTH)
    classes, class_of = np.unique(logs.astype(np.int64), return_inverse=True)
    counts = np.zeros((SLICES, len(classes)))
    np.add.at(counts, (slice_of, class_of), 1)
    sums = _drawn_counts() @ counts
    return _bounds(figure(sums[sums.sum(axis=1) > 0], _SMALLEST_S * _GROWTH ** (classes + 0.5)))


def _quantiles(sums: Floats, classes_s: Floats, quantile: float) -> Floats:
    """The value at a quantile of each row of counts."""
    reached = np.cumsum(sums, axis=1)
    places = (reached < quantile * reached[:, -1:]).sum(axis=1)
    return np.asarray(classes_s[places])
