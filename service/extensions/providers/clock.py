"""The sources of time and randomness of a provider's runtime. Tests replace them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """`now_s` is the monotonic clock of deadlines, `wall_s` that of dates (Unix time)."""

    now_s: Callable[[], float] = time.monotonic
    wall_s: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep
    # Returns a random number between two bounds.
    uniform: Callable[[float, float], float] = random.uniform
