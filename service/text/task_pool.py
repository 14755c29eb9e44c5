"""A pool of `TaskProcess`es of one kind. Reuse makes a task cost a millisecond instead of a start of Python.

A process runs tasks of one key, one at a time. The pool replaces a process that has ended or has run
`max_tasks` tasks, and ends one that is idle for `idle_s`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from service.errors import Draining
from service.text.task_process import TaskFailed, TaskProcess

_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class _Idle:
    """A process that waits for a task."""

    key: str
    process: TaskProcess
    since_s: float = field(default_factory=time.monotonic)


class TaskPool:
    """Owns the processes. Used from one event loop."""

    def __init__(
        self,
        new_process: Callable[[], TaskProcess],
        max_processes: int = 1,
        max_tasks: float = math.inf,
        idle_s: float | None = None,
    ) -> None:
        """`max_tasks`: of one process. `idle_s`: how long an idle process is kept; None: for ever."""
        self._new_process = new_process
        self._max_processes = max_processes
        self._max_tasks = max_tasks
        self._idle_s = idle_s
        self._permits = asyncio.Semaphore(max_processes)
        # Ordered by last use: the most recent is last.
        self._idle: list[_Idle] = []
        self._busy: set[TaskProcess] = set()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def run(self, work: Callable[[TaskProcess], _Result], key: str = "") -> _Result:
        """Calls `work` with a process, in a thread. Cancelling the call ends the process.

        Retries if something other than this task ended the process. Raises what `work` raises; Draining once
        the pool is closed.
        """
        while True:
            await self._permits.acquire()
            if self._is_closed:
                self._permits.release()
                raise Draining
            try:
                return await self._run(work, key)
            except TaskFailed as error:
                if self._is_closed:
                    raise Draining from None
                if error.is_task_fault:
                    raise

    def close(self) -> None:
        """Ends all processes; running tasks fail. Idempotent."""
        self._is_closed = True
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        for process in self._busy:
            process.kill()
        for idle in self._idle:
            idle.process.close()
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        """Of the idle processes."""
        return [idle.process.pid for idle in self._idle if idle.process.pid is not None]

    async def _run(self, work: Callable[[TaskProcess], _Result], key: str) -> _Result:
        """As `run`, once. Releases the permit that the caller acquired when the process is idle again."""
        process = self._take(key)
        try:
            running = asyncio.get_running_loop().run_in_executor(None, work, process)
        except RuntimeError:
            # No thread can be started now.
            self._permits.release()
            process.close()
            raise
        self._busy.add(process)
        running.add_done_callback(lambda running: self._on_done(key, process, running))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            process.kill()
            raise

    def _on_done(self, key: str, process: TaskProcess, running: asyncio.Future[Any]) -> None:
        self._busy.discard(process)
        self._permits.release()
        # Marks the exception as retrieved: a cancelled caller does not.
        _ = running.cancelled() or running.exception()
        if process.is_closed or self._is_closed or process.num_tasks >= self._max_tasks:
            process.close()
            return
        self._idle.append(_Idle(key, process))
        if self._idle_timer is None:
            self._end_idle()

    def _take(self, key: str) -> TaskProcess:
        """An idle process with this key; else a new one, for which the least recently used may be ended."""
        for index in reversed(range(len(self._idle))):
            if self._idle[index].key == key:
                return self._idle.pop(index).process
        while self._idle and len(self._idle) + len(self._busy) >= self._max_processes:
            self._idle.pop(0).process.close()
        return self._new_process()

    def _end_idle(self) -> None:
        """Ends processes that are idle for too long, and sets a timer for the others."""
        self._idle_timer = None
        if self._idle_s is None:
            return
        now_s = time.monotonic()
        for idle in [idle for idle in self._idle if now_s - idle.since_s >= self._idle_s]:
            self._idle.remove(idle)
            idle.process.close()
        if self._idle:
            due_s = min(idle.since_s for idle in self._idle) + self._idle_s - now_s
            self._idle_timer = asyncio.get_running_loop().call_later(due_s, self._end_idle)
