"""Decides whether and when a failed request is retried. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime

from service.errors import ProviderFailure
from service.runtimes.remote.config import ProviderConfig

# Reasons for which a retry can help.
_RETRYABLE = frozenset({"RATE_LIMITED", "NETWORK_ERROR", "SERVER_ERROR", "TIMEOUT"})


def delay_s(
    failure: ProviderFailure,
    retries: int,
    left_s: float,
    config: ProviderConfig,
    uniform: Callable[[float, float], float],
) -> float | None:
    """The delay before the next retry, after `retries` of them. None: no retry.

    Exponential backoff from retry_min_s to retry_max_s with full jitter, so that requests that failed
    together are not retried together. The provider's Retry-After is a lower bound. `left_s`: until the
    deadline.
    """
    if failure.reason not in _RETRYABLE or retries >= config.max_retries:
        return None
    ceiling = min(config.retry_max_s, config.retry_min_s * 2.0**retries)
    delay = uniform(0.0, ceiling)
    if failure.retry_after_s is not None:
        if failure.retry_after_s > config.max_retry_after_s:
            return None
        delay = max(delay, failure.retry_after_s)
    return delay if delay < left_s else None


def retry_after_s(header: str | None, wall_s: float) -> float | None:
    """The delay of a Retry-After header, which holds seconds or a date. None: missing or not valid."""
    if header is None:
        return None
    try:
        seconds = float(header) if header[:1].isdigit() else _until(header, wall_s)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(date: str, wall_s: float) -> float:
    # The zone "-0000" parses as no zone. HTTP dates are in UTC.
    parsed = parsedate_to_datetime(date)
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp() - wall_s
