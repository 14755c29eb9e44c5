"""A pool of `TaskProcess`es of one kind. Reuse makes a task cost a millisecond instead of a start of Python.

A process runs tasks of one key, one at a time. The pool replaces a process that has ended or has run
`max_tasks` tasks.
"""

from __future__ import annotations

import asyncio
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
        self._max_processes = max_processes
        self._max_tasks = max_tasks
        self._permits = asyncio.Semaphore(max_processes)
        # With their keys, the most recently used last.
        self._idle: list[tuple[str, TaskProcess]] = []
        self._busy: set[TaskProcess] = set()
        self._is_closed = False

    async def run(self, work: Callable[[TaskProcess], _Result], key: str = "") -> _Result:
        """Calls `work` with a process, in a thread. Cancelling the call ends the process.

        Retries if something other than this task ended the process. Raises what `work` raises; Draining once
        the pool is closed.
        """
        while True:
            async with self._permits:
                if self._is_closed:
                    raise Draining
                process = self._take(key)
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
                    self._put_back(key, process)

    def close(self) -> None:
        """Ends all processes; running tasks fail. Idempotent."""
        self._is_closed = True
        for process in self._busy:
            process.kill()
        for _, process in self._idle:
            process.close()
        self._idle.clear()

    @property
    def pids(self) -> list[int]:
        """Of the idle processes."""
        return [process.pid for _, process in self._idle if process.pid is not None]

    def _take(self, key: str) -> TaskProcess:
        """An idle process with this key; else a new one, for which the least recently used may be ended."""
        for index in reversed(range(len(self._idle))):
            if self._idle[index][0] == key:
                return self._idle.pop(index)[1]
        while self._idle and len(self._idle) + len(self._busy) >= self._max_processes:
            self._idle.pop(0)[1].close()
        return self._new_process()

    def _put_back(self, key: str, process: TaskProcess) -> None:
        if process.is_closed or self._is_closed or process.num_tasks >= self._max_tasks:
            process.close()
        else:
            self._idle.append((key, process))


async def _run_in_thread(work: Callable[[TaskProcess], _Result], process: TaskProcess) -> _Result:
    """The result of `work`. Returns only when the thread no longer uses the process."""
    running = asyncio.get_running_loop().run_in_executor(None, work, process)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        process.kill()
        await asyncio.gather(running, return_exceptions=True)
        raise
