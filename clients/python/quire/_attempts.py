"""Retries with exponential backoff, for calls that `_methods` marks as safe to retry."""

from __future__ import annotations

import math
import random
import time
from typing import Any

from quire._methods import Method
from quire.errors import QuireError, Unavailable, from_status, is_connection_error

MAX_ATTEMPTS = 4
# With several gateways: until another one has taken over.
_MAX_ATTEMPTS_OF_SEVERAL = 16
_INITIAL_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0
# If the server asks for a longer delay, the call fails at once.
_MAX_SERVER_DELAY_S = 60.0
_BACKOFF_MULTIPLIER = 3


class Attempts:
    """The attempts of one call. Does not sleep or send by itself."""

    __slots__ = ("_backoff_s", "_deadline_s", "_is_batch", "_left")

    def __init__(
        self,
        method: Method[Any, Any],
        request: Any,
        timeout_s: float | None,
        *,
        retries: bool = True,
        several: bool = False,
    ) -> None:
        """`timeout_s` limits all attempts together. None: no limit. `several`: there are several gateways."""
        most = _MAX_ATTEMPTS_OF_SEVERAL if several else MAX_ATTEMPTS
        self._left = most if retries and method.can_retry(request) else 1
        self._is_batch = method.rpc.startswith("Batch")
        self._backoff_s = _INITIAL_BACKOFF_S
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """The timeout of the next attempt. None: no limit."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def failed_item(self, response: Any) -> QuireError | None:
        """The error of an item whose gateway was away. None: there is none, or no time to repeat the batch.

        Items that were applied are not applied again.
        """
        if self._left == 1 or not self._is_batch:
            return None
        left_s = self.left_s()
        longest_s = min(_MAX_SERVER_DELAY_S, math.inf if left_s is None else left_s)
        errors = (from_status(result.error) for result in response.results if result.HasField("error"))
        gone = (error for error in errors if isinstance(error, Unavailable))
        return next((e for e in gone if max(_MAX_BACKOFF_S, e.retry_delay_s or 0.0) < longest_s), None)

    def backoff_s(self, error: QuireError) -> float:
        """The delay before the next attempt. Raises `error`, that of the failed attempt, if there is none."""
        self._left -= 1
        if not self._left or not is_connection_error(error):
            raise error
        # Jitter spreads the retries of many clients. The server's delay is the minimum.
        server_delay_s = error.retry_delay_s or 0.0
        backoff_s = max(self._backoff_s * random.uniform(0.5, 1.0), server_delay_s)
        left_s = self.left_s()
        if server_delay_s > _MAX_SERVER_DELAY_S or (left_s is not None and backoff_s >= left_s):
            raise error
        self._backoff_s = min(self._backoff_s * _BACKOFF_MULTIPLIER, _MAX_BACKOFF_S)
        return backoff_s
