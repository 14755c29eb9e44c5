"""Owns the processes for tasks of one kind, and gives tenants their turns at them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from service.errors import Draining
from service.text.task_process import TaskFailed, TaskProcess
from service.text.tasks import TaskKind
from service.turns import Turns

_Result = TypeVar("_Result")


class TaskPool:
    """Reuses processes: a task costs a fraction of a millisecond, not a start of Python.

    A process that has ended, or has run its number of tasks, is replaced. Used from one event loop.
    """

    def __init__(
        self, kind: TaskKind, setup_task: bytes | None = None, first: TaskProcess | None = None
    ) -> None:
        """`setup_task`: what each process runs first. `first`: one that has run it."""
        self._kind = kind
        self._setup_task = setup_task
        self._turns = Turns(kind.max_processes)
        # Most recently used last.
        self.idle = [] if first is None else [first]
        self._busy: set[TaskProcess] = set()
        # Work that continues although its caller has left.
        self._tasks: set[asyncio.Future[Any]] = set()
        self._is_closed = False

    async def run(
        self, work: Callable[[TaskProcess], Coroutine[Any, Any, _Result]], tenant: str = ""
    ) -> _Result:
        """Calls `work` with a process when it is the tenant's turn. The turn lasts as long as the work does.

        If the call is cancelled meanwhile, the process ends or the work continues, as the kind says. Retries
        if something other than this task ended the process. Raises what `work` raises; Draining once the pool
        is closed.
        """
        while True:
            await self._turns.begin(tenant)
            running = self._run(work, tenant)
            try:
                if self._kind.ends_with_caller:
                    return await running
                return await asyncio.shield(self._outliving(running))
            except TaskFailed as error:
                if self._is_closed:
                    raise Draining from None
                if error.is_task_fault:
                    raise

    def close(self) -> None:
        """Ends all processes; running tasks fail. Idempotent."""
        self._is_closed = True
        for process in self._busy:
            process.kill()
        for process in self.idle:
            process.close()
        self.idle.clear()

    def _outliving(self, running: Coroutine[Any, Any, _Result]) -> asyncio.Future[_Result]:
        task = asyncio.ensure_future(running)
        # The event loop does not keep it.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run(self, work: Callable[[TaskProcess], Awaitable[_Result]], tenant: str) -> _Result:
        """Also ends the turn."""
        try:
            if self._is_closed:
                raise Draining
            process = self.idle.pop() if self.idle else TaskProcess(self._kind, self._setup_task)
            self._busy.add(process)
            try:
                return await work(process)
            finally:
                self._busy.discard(process)
                await self._keep_or_end(process)
        finally:
            self._turns.end(tenant)

    async def _keep_or_end(self, process: TaskProcess) -> None:
        if process.is_closed or self._is_closed or process.num_tasks >= self._kind.max_tasks:
            await process.end()
        else:
            self.idle.append(process)
