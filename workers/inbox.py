"""A queue between threads with reliable timeouts: any thread puts, one gets.

`queue.SimpleQueue.get` waits for ever if its timeout passes before it begins to wait, as happens with a short
timeout or on a busy machine (seen with CPython 3.11 and 3.12, not with 3.13).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Inbox(Generic[_Item]):
    """First in, first out, and unbounded: limits are checked before `put`. `items`: what is queued."""

    def __init__(self) -> None:
        self.items: deque[_Item] = deque()
        # A signal rather than a lock: `put` releases it after adding an item, `get` acquires it to wait.
        self._added = threading.Lock()

    def put(self, item: _Item) -> None:
        """Never waits."""
        self.items.append(item)
        try:  # noqa: SIM105 - suppress() costs as much as all the rest of this
            self._added.release()
        except RuntimeError:
            # It is released already, since an earlier item is queued.
            pass

    def get(self, timeout_s: float | None = None) -> _Item:
        """Waits for an item, and returns the oldest. Raises queue.Empty after `timeout_s` (None: never)."""
        ends = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # Whatever is added after this releases it again.
            self._added.acquire(blocking=False)
            if self.items:
                return self.items.popleft()
            # The release may be of an item that was taken already. Then this waits again.
            left_s = -1.0 if ends is None else max(0.0, ends - time.monotonic())
            if not self._added.acquire(timeout=left_s) and not self.items:
                raise queue.Empty
