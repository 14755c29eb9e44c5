"""Processes for chat templates that stay, so that a prompt costs a millisecond and not the start of Python.

A process writes prompts of one template, one at a time. It is replaced after a failure, after so many
prompts, and when nobody has wanted it for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from service.text import chat_template
from service.text.chat_template import TemplateError
from service.text.task_process import TaskFailed, TaskProcess

MAX_PROCESSES = 2
MAX_TASKS = 1000
IDLE_S = 60.0


@dataclass(eq=False, slots=True)
class _Kept:
    """A process that waits for a task."""

    source: str
    process: TaskProcess
    since_s: float = field(default_factory=time.monotonic)


class TemplatePool:
    """Owner of the processes. Used from one event loop."""

    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(MAX_PROCESSES)
        # The one that was used last is last.
        self._kept: list[_Kept] = []
        self._working: set[TaskProcess] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def write(self, source: str, task: bytes) -> str:
        """The prompt that a template of this source makes of a task (`make_task`).

        Cancelling it ends the process that works on it.

        Raises:
            TemplateError: It failed, or went beyond a bound.
        """
        await self._permits.acquire()
        process = self._take(source)
        is_fresh = process.num_tasks == 0
        try:
            said = await self._ask(source, process, task)
        except TemplateError as error:
            cause = error.__cause__
            if is_fresh or (isinstance(cause, TaskFailed) and cause.is_own_doing):
                raise
            # Earlier tasks, or somebody else, had ended it.
            await self._permits.acquire()
            said = await self._ask(source, self._new(), task)
        return chat_template.read_answer(said)

    def close(self) -> None:
        """Ends all processes; what is under way fails. May be called again."""
        self._is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        for process in self._working:
            process.kill()
        for kept in self._kept:
            kept.process.end()
        self._kept.clear()

    @property
    def pids(self) -> list[int]:
        """Of the processes that wait for tasks."""
        return [kept.process.pid for kept in self._kept if kept.process.pid is not None]

    async def _ask(self, source: str, process: TaskProcess, task: bytes) -> Mapping[str, Any]:
        """What the process says. The permit that was acquired is given back once the process is idle."""
        self._working.add(process)
        asked = asyncio.get_running_loop().run_in_executor(None, chat_template.ask, process, task)
        asked.add_done_callback(lambda asked: self._done(source, process, asked))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            process.kill()
            raise

    def _done(self, source: str, process: TaskProcess, asked: asyncio.Future[Mapping[str, Any]]) -> None:
        self._working.discard(process)
        self._permits.release()
        is_over = asked.cancelled() or asked.exception() is not None or "is_spent" in asked.result()
        if is_over or self._is_closed or process.num_tasks >= MAX_TASKS:
            process.end()
            return
        self._kept.append(_Kept(source, process))
        if self._watch is None:
            self._watch_for_idle()

    def _take(self, source: str) -> TaskProcess:
        """One that knows the template, if there is one."""
        for index in reversed(range(len(self._kept))):
            if self._kept[index].source == source:
                return self._kept.pop(index).process
        return self._new()

    def _new(self) -> TaskProcess:
        """One that knows nothing yet; another's makes room for it."""
        while self._kept and len(self._kept) + len(self._working) >= MAX_PROCESSES:
            self._kept.pop(0).process.end()
        return chat_template.new_process()

    def _watch_for_idle(self) -> None:
        """Ends those that nobody has wanted, and looks again while there are others."""
        now_s = time.monotonic()
        for kept in [kept for kept in self._kept if now_s - kept.since_s >= IDLE_S]:
            self._kept.remove(kept)
            kept.process.end()
        self._watch = None
        if self._kept:
            due_s = min(kept.since_s for kept in self._kept) + IDLE_S - now_s
            self._watch = asyncio.get_running_loop().call_later(due_s, self._watch_for_idle)
