"""Reads adapters on a thread of its own, one after the other, in the order in which they are wanted.

Used by the thread of the step loop, except where said.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from workers.adapters.slots import KnownAdapter, LoadedAdapter
from workers.operations import AdapterRead, AdapterSource

_Weights = TypeVar("_Weights")

OnThread = Callable[[Callable[[], None]], None]
"""Calls a function on another thread."""


def on_thread(function: Callable[[], None]) -> None:
    """See `OnThread`."""
    threading.Thread(target=function, name="adapter", daemon=True).start()


class AdapterReader(Generic[_Weights]):
    """Owner of the reading thread, and of the queue of adapters that are wanted."""

    def __init__(
        self, read: Callable[[AdapterSource], LoadedAdapter[_Weights]], on_thread: OnThread = on_thread
    ) -> None:
        """`read` is called on the other thread."""
        self._read = read
        self._on_thread = on_thread
        # Called from the reading thread with what it has read, or the exception.
        self.submit: Callable[[AdapterRead], None]
        self._queue: deque[KnownAdapter[_Weights]] = deque()
        self._reading: KnownAdapter[_Weights] | None = None

    def __contains__(self, known: KnownAdapter[_Weights]) -> bool:
        return known is self._reading or known in self._queue

    def want(self, known: KnownAdapter[_Weights]) -> None:
        """Queues an adapter that is not here yet."""
        if known not in self:
            self._queue.append(known)

    def forget(self, known: KnownAdapter[_Weights]) -> None:
        """Removes an adapter from the queue. One that is being read is read to its end."""
        if known in self._queue:
            self._queue.remove(known)

    def start(self) -> None:
        """Starts to read the next adapter, unless one is being read."""
        if self._queue and self._reading is None:
            self._reading = self._queue.popleft()
            self._on_thread(functools.partial(self._run, self._reading.source))

    def finish(self) -> KnownAdapter[_Weights] | None:
        """The adapter that was read. `submit` has got its weights."""
        known, self._reading = self._reading, None
        return known

    def _run(self, source: AdapterSource) -> None:
        """The reading thread."""
        outcome: object
        try:
            outcome = self._read(source)
        except Exception as error:
            outcome = error
        self.submit(AdapterRead(source.number, outcome))
