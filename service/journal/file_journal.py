"""A journal in segment files. Records survive a crash of the gateway; with `sync` "full", of the system.

With "normal", a crash of the system may lose the commits of the last seconds, but never earlier ones, so the
journal has no gaps. A commit is one write into the page cache, which takes less time than waking a thread, so
it is done on the event loop (ADR 56). A thread does what waits for the disk: with "full" each commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from service.journal.base import OwnershipLost
from service.journal.recovery import Apply, Recovery
from service.journal.segment_writer import FileChanged, LostFrames, Segments
from service.journal.segments import Sync
from service.journal.stored import CHECK_S, COMPACTION_BYTES, MAX_PAYLOAD_BYTES, StoredJournal
from service.logging import RareWarnings, get_logger

_log = get_logger(__name__)

_CLOSE_S: Final = 5.0
# After a write that blocked the event loop for longer than `_SLOW_S`, the thread writes for `_PAUSE` times as
# long.
_SLOW_S: Final = 0.02
_PAUSE: Final = 100
# A thread that waits for the GIL gets it within the switch interval from a thread that computes, but may
# never get it from a busy event loop: each turn of the loop releases the GIL for less time than a thread
# needs to wake up, which also restarts the interval. Commits then waited for seconds. So a loop that sees no
# progress of the thread for `_STALLED_S` sleeps for `_GIVE_WAY_S`; again after `_RETRY_S`, and then after
# twice as long each time, since the thread may be waiting for a slow disk instead.
_STALLED_S: Final = 0.004
_GIVE_WAY_S: Final = 0.0002
_RETRY_S: Final = 0.001
_MAX_RETRY_S: Final = 0.008

# The payload of a commit, or a function that runs on the thread between commits.
_Item = bytes | Callable[[], None]


class FileJournal(StoredJournal):
    """Owner of the files, which are locked until it is closed, and of a thread."""

    def __init__(
        self, directory: Path, apply: Apply, sync: Sync = "normal", compaction_bytes: int = COMPACTION_BYTES
    ) -> None:
        """Creates missing files, and applies all records: in order for each cache and its forks.

        Consecutive appends are merged. Raises JournalUnusable, maybe after some records.
        """
        super().__init__(compaction_bytes)
        recovery = Recovery(apply)
        self._segments = Segments(directory, sync, recovery)
        self._size_bytes = recovery.size_bytes
        # Why nothing can ever be written again. Empty: it can.
        self._loss = ""
        self._lost = asyncio.Event()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        # The numbers of items given to the thread, and finished by it. Only the thread writes the second.
        self._given_items = self._done_items = 0
        self._is_watched = False
        # The time before which no commit is written on the event loop.
        self._on_loop_from = math.inf if sync == "full" else 0.0
        self._warn = RareWarnings(__name__, directory=str(directory))

    def _store(self, payload: bytes, *, at_once: bool) -> bool | None:
        began_at = time.monotonic()
        lock = self._segments.lock
        if at_once and not self._loss and began_at >= self._on_loop_from and lock.acquire(blocking=False):
            try:
                self._segments.append((payload,))
                return True
            except FileChanged:
                # Another program wrote to the file. Checking all frames takes long: leave it to the thread.
                pass
            except BaseException as error:
                # An exception of any type fails the commit, and later ones can be written.
                self._warn("a write to the journal failed", error)
                return False
            finally:
                lock.release()
                took_s = time.monotonic() - began_at
                if took_s > _SLOW_S:
                    self._on_loop_from = began_at + _PAUSE * took_s
        self._put(payload)
        return None

    async def run(self) -> None:
        """See `Journal.run`. Raises OwnershipLost if frames were lost: the next start says what to do."""
        maintaining = [asyncio.create_task(work) for work in (self._compact_forever(), self._sync_forever())]
        try:
            await self._lost.wait()
        finally:
            for task in maintaining:
                task.cancel()
        _log.error("the journal has lost frames", error=self._loss)
        raise OwnershipLost(self._loss)

    async def _sync_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            await self.sync()

    async def sync(self) -> None:
        """See `Journal.sync`. A failure is logged: the disk may work again at the next one."""
        if self._segments.is_unsynced and not self._closed:
            await self._on_thread(self._segments.sync, "the journal could not be synced")

    async def _prepare(self) -> bool:
        return await self._on_thread(self._segments.prepare, "the journal could not be compacted")

    def _set_mark(self) -> None:
        with self._segments.lock:
            self._segments.switch()

    async def _drop(self) -> bool:
        return await self._on_thread(self._segments.drop_earlier, "the journal could not be compacted")

    def close(self) -> None:
        """See `Journal.close`. Callbacks run afterwards, on the event loop."""
        if self._closed:
            return
        self._closed = True
        self._give(self._end)
        assert self._thread is not None
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.error("timeout while writing the rest of the journal")

    # The thread.

    def _put(self, item: _Item) -> None:
        self._give(item)
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_later(_STALLED_S, self._watch, self._done_items, _RETRY_S)

    def _watch(self, done_items: int, retry_s: float) -> None:
        """Lets the thread run if it has finished nothing since `done_items`. Repeats while it has items."""
        loop = asyncio.get_running_loop()
        if self._done_items == self._given_items or self._has_ended:
            self._is_watched = False
        elif self._done_items != done_items:
            loop.call_later(_STALLED_S, self._watch, self._done_items, _RETRY_S)
        else:
            time.sleep(_GIVE_WAY_S)
            loop.call_later(retry_s, self._watch, done_items, min(2 * retry_s, _MAX_RETRY_S))

    def _give(self, item: _Item) -> None:
        self._given_items += 1
        self._queue.put(item)
        if self._thread is None:
            # A daemon thread, because a blocked write must not keep the process alive.
            self._thread = threading.Thread(target=self._run_thread, name="journal", daemon=True)
            self._thread.start()

    async def _on_thread(self, work: Callable[[], None], warning: str) -> bool:
        """Runs `work` on the thread. False: it failed."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()

        def tell(ok: bool) -> None:
            if not done.done():
                done.set_result(ok)

        def run() -> None:
            ok = False
            try:
                if not self._loss:
                    work()
                    ok = True
            except Exception as error:
                self._warn(warning, error)
            self._call_soon(loop, tell, ok)

        self._put(run)
        return await done

    def _run_thread(self) -> None:
        while not self._has_ended:
            item: _Item | None = self._queue.get()
            payloads: list[bytes] = []
            size = 0
            while isinstance(item, bytes):
                payloads.append(item)
                size += len(item)
                item = None
                if size <= MAX_PAYLOAD_BYTES:
                    with contextlib.suppress(queue.Empty):
                        item = self._queue.get_nowait()
            if payloads:
                with self._segments.lock:
                    durable = self._append(payloads)
                self._done_items += len(payloads)
                self._call_soon(self._loop, self._finish, len(payloads), durable)
            if item is not None:
                item()
                self._done_items += 1

    def _append(self, payloads: list[bytes]) -> bool:
        """Appends payloads on the thread, which holds the lock. Returns whether they are durable."""
        try:
            if self._loss:
                return False
            try:
                self._segments.append(payloads)
            except FileChanged:
                self._segments.check()
                self._segments.append(payloads)
            return True
        except LostFrames as error:
            self._loss = str(error)
            self._call_soon(self._loop, self._lost.set)
        except BaseException as error:
            # An exception of any type fails the commits, and later ones can be written.
            self._warn("a write to the journal failed", error)
        return False

    def _call_soon(self, loop: asyncio.AbstractEventLoop, *call: Any) -> None:
        # The loop may be closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(*call)

    def _end(self) -> None:
        self._has_ended = True
        try:
            if not self._loss:
                self._segments.sync()
        except Exception as error:
            self._warn("the journal could not be synced", error)
        self._segments.close()
