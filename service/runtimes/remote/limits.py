"""How much may be asked of a provider: requests and tokens a minute, requests at a time.

Pure: the time is given.
"""

from __future__ import annotations

from quire.v1 import runner_pb2

_MINUTE_S = 60.0
# Of a bucket's capacity: less than this is rounding.
_DUST = 1e-9


class Bucket:
    """Holds what may be taken within a minute, and fills evenly. Begins full.

    What is put back counts again, and what turns out to have been more is taken after the fact: the level may
    be below 0 for a while.
    """

    def __init__(self, per_minute: float) -> None:
        self.per_minute = per_minute
        self._level = per_minute
        self._at_s: float | None = None

    def wait_s(self, amount: float, now_s: float) -> float:
        """When so much can be taken, from now on. More than the bucket holds can be when it is full."""
        missing = min(amount, self.per_minute) - self.left(now_s)
        return 0.0 if missing <= self.per_minute * _DUST else missing / self.per_minute * _MINUTE_S

    def take(self, amount: float, now_s: float) -> None:
        """Takes so much, whatever there is. A negative amount is put back."""
        self._level = min(self.per_minute, self.left(now_s) - amount)

    def left(self, now_s: float) -> float:
        """What is there. A time before the last one asked for changes nothing."""
        at_s = now_s if self._at_s is None else self._at_s
        if now_s >= at_s:
            grown = self._level + (now_s - at_s) / _MINUTE_S * self.per_minute
            self._level, self._at_s = min(self.per_minute, grown), now_s
        return self._level


class Limits:
    """The limits of one provider, and what of them is left. None: there is no such limit."""

    def __init__(self, requests: float | None, tokens: float | None, max_concurrent: int) -> None:
        self._requests = None if requests is None else Bucket(requests)
        self._tokens = None if tokens is None else Bucket(tokens)
        self._max_concurrent = max_concurrent
        self._running = 0

    @property
    def running(self) -> int:
        """Requests that have begun and not ended."""
        return self._running

    @property
    def is_busy(self) -> bool:
        """Whether as many requests run as may: only the end of one helps."""
        return self._running >= self._max_concurrent

    def wait_s(self, tokens: int, now_s: float) -> float:
        """How long the buckets keep a request of so many tokens waiting."""
        waits = [0.0]
        if self._requests is not None:
            waits.append(self._requests.wait_s(1, now_s))
        if self._tokens is not None:
            waits.append(self._tokens.wait_s(tokens, now_s))
        return max(waits)

    def begin(self, tokens: int, now_s: float) -> None:
        """A request is sent, which is expected to use so many tokens."""
        self._running += 1
        if self._requests is not None:
            self._requests.take(1, now_s)
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)

    def end(self, expected_tokens: int, used_tokens: int, now_s: float) -> None:
        """A request has ended, and used so many instead."""
        self._running -= 1
        if self._tokens is not None:
            self._tokens.take(used_tokens - expected_tokens, now_s)

    def message(self, now_s: float) -> runner_pb2.RateLimits:
        """As callers see them."""
        said = runner_pb2.RateLimits(max_concurrent=self._max_concurrent, running=self._running)
        if self._requests is not None:
            said.requests_per_minute = self._requests.per_minute
            said.requests_left = self._requests.left(now_s)
        if self._tokens is not None:
            said.tokens_per_minute = self._tokens.per_minute
            said.tokens_left = self._tokens.left(now_s)
        return said
