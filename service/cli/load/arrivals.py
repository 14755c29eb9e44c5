"""When requests are meant to start, in seconds from the start of a run. Knows nothing of what they hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["poisson", "constant"]


def arrivals(kind: Kind, rate: float, seed: int) -> Iterator[float]:
    """Endless times that never fall, `rate` of them a second in the mean. The same seed: the same times."""
    return poisson(rate, seed) if kind == "poisson" else constant(rate)


def constant(rate: float) -> Iterator[float]:
    """One every 1 / `rate` seconds, the first at once."""
    # Not a running sum, which would drift.
    return (index / rate for index in itertools.count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """As callers arrive who know nothing of each other: gaps are drawn from an exponential distribution."""
    draws = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        at_s += draws.expovariate(rate)
        yield at_s
