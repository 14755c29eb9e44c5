"""A queue between threads whose timeouts hold: any thread puts, one gets.

`queue.SimpleQueue.get` waits for ever where a timeout passes before it has begun to wait, for which a busy
machine or a short timeout is enough (seen with CPython 3.11 and 3.12, and not with 3.13).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """First in, first out, and unbounded: who puts has checked limits before. `items`: those that wait."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        # Released by `put`, after it has added its item. Nobody holds it for longer than a call.
        self._added = threading.Lock()

    def put(self, item: _Item) -> None:
        """Never waits."""
        self.items.append(item)
        try:  # noqa: SIM105 - suppress() costs as much as all the rest of this
            self._added.release()
        except RuntimeError:
            # It is released already: an earlier item waits, too.
            pass

    def get(self, timeout_s: float | None = None) -> _Item:
        """The oldest item, once there is one. None: waits for it without an end.

        Raises queue.Empty after `timeout_s`.
        """
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Whatever is added after this releases it again.
            self._added.acquire(blocking=False)
            if self.items:
                return self.items.popleft()
            # A release may be that of an item which was taken already: then it is waited for again.
            left_s = -1.0 if ends is None else max(0.0, ends - time.monotonic())
            if not self._added.acquire(timeout=left_s) and not self.items:
                raise queue.Empty
