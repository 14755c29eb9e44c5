"""A pool of `TaskProcess`es of one kind. Reuse makes a task cost a millisecond instead of a start of Python.

A process runs one task at a time. The pool replaces a process that has ended or has run `max_tasks` tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import TypeVar

from service.errors import Draining
from service.text.task_process import TaskFailed, TaskProcess

_Result = TypeVar("_Result")


class TaskPool:
    """Owns the processes. Used from one event loop."""

    def __init__(
        self,
        new_process: Callable[[], TaskProcess],
        max_processes: int = 1,
        max_tasks: float = math.inf,
    ) -> None:
        """`max_tasks`: of one process."""
        self._new_process = new_process
        self._max_tasks = max_tasks
        self._permits = asyncio.Semaphore(max_processes)
        # The most recently used last.
        self.idle: list[TaskProcess] = []
        self._busy: set[TaskProcess] = set()
        self._is_closed = False

    async def run(self, work: Callable[[TaskProcess], _Result]) -> _Result:
        """Calls `work` with a process, in a thread. Cancelling the call ends the process.

        Retries if something other than this task ended the process. Raises what `work` raises; Draining once
        the pool is closed.
        """
        while True:
            async with self._permits:
                if self._is_closed:
                    raise Draining
                process = self.idle.pop() if self.idle else self._new_process()
                self._busy.add(process)
                try:
                    return await _run_in_thread(work, process)
                except TaskFailed as error:
                    if self._is_closed:
                        raise Draining from None
                    if error.is_task_fault:
                        raise
                finally:
                    self._busy.discard(process)
                    self._put_back(process)

    def close(self) -> None:
        """Ends all processes; running tasks fail. Idempotent."""
        self._is_closed = True
        for process in self._busy:
            process.kill()
        for process in self.idle:
            process.close()
        self.idle.clear()

    def _put_back(self, process: TaskProcess) -> None:
        if process.is_closed or self._is_closed or process.num_tasks >= self._max_tasks:
            process.close()
        else:
            self.idle.append(process)


async def _run_in_thread(work: Callable[[TaskProcess], _Result], process: TaskProcess) -> _Result:
    """The result of `work`. Returns only when the thread no longer uses the process."""
    running = asyncio.get_running_loop().run_in_executor(None, work, process)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        process.kill()
        while not running.done():
            # Cancelled again: still not before the thread has ended.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        # Marks the exception as retrieved.
        _ = running.cancelled() or running.exception()
        raise
