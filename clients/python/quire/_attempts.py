"""How often a call is made, and when: again only where `_methods` says that it may be sent twice."""

from __future__ import annotations

import random
import time
from typing import Any

from quire._methods import Method
from quire.errors import QuireError, Unavailable

MOST_ATTEMPTS = 4
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
# A server that asks for a longer one is not waited for.
_LONGEST_TOLD_PAUSE_S = 60.0
_PAUSE_GROWS_BY = 3


class Attempts:
    """The attempts of one call. Nothing here waits or sends."""

    __slots__ = ("_left", "_pause_s", "_until_s")

    def __init__(self, method: Method[Any, Any], request: Any, timeout_s: float | None) -> None:
        """Before the first one. `timeout_s` bounds all of them together; None: no bound."""
        self._left = MOST_ATTEMPTS if method.may_repeat(request) else 1
        self._pause_s = _FIRST_PAUSE_S
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """How long the next one may take; None: as long as it takes."""
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def pause_s(self, error: QuireError) -> float:
        """How long to wait before the next one. Raises `error`, of the one that failed, if there is none."""
        self._left -= 1
        if not self._left or not isinstance(error, Unavailable):
            raise error
        # Not all come again at once, and none before the server says.
        told_s = error.retry_delay_s or 0.0
        pause_s = max(self._pause_s * random.uniform(0.5, 1.0), told_s)
        left_s = self.left_s()
        if told_s > _LONGEST_TOLD_PAUSE_S or (left_s is not None and pause_s >= left_s):
            raise error
        self._pause_s = min(self._pause_s * _PAUSE_GROWS_BY, _LONGEST_PAUSE_S)
        return pause_s
