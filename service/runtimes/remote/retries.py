"""Whether a request that failed is sent again, and when. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

from service.errors import ProviderFailure
from service.runtimes.remote.config import ProviderConfig

# What another try can mend.
_PASSING = frozenset({"RATE_LIMITED", "NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})


def delay_s(
    failure: ProviderFailure,
    retries: int,
    left_s: float,
    config: ProviderConfig,
    uniform: Callable[[float, float], float],
) -> float | None:
    """How long to wait before the next try, of which there were `retries`. None: there is none.

    Doubles from retry_min_s to retry_max_s, of which a random part is taken: those who failed together do not
    come back together. What the provider asked for is waited in any case. `left_s`: until the deadline.
    """
    if failure.reason not in _PASSING or retries >= config.max_retries:
        return None
    ceiling = min(config.retry_max_s, config.retry_min_s * 2.0**retries)
    delay = uniform(0.0, ceiling)
    if failure.retry_after_s is not None:
        if failure.retry_after_s > config.max_retry_after_s:
            return None
        delay = max(delay, failure.retry_after_s)
    return delay if delay < left_s else None


def retry_after_s(header: str | None, wall_s: float) -> float | None:
    """What a Retry-After says: seconds, or a date. None: nothing that can be understood."""
    if header is None:
        return None
    try:
        seconds = float(header) if header[:1].isdigit() else _until(header, wall_s)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(date: str, wall_s: float) -> float:
    # One with "-0000" comes without a zone, and is in UTC like all of HTTP.
    parsed = parsedate_to_datetime(date)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() - wall_s
