"""An event loop that never waits: when nothing is left to do, its clock jumps to the next timer.

Two runs of the same program do the same things in the same order. `pause` stops the whole process for a
while, as SIGSTOP or a paused machine does: afterwards all timers that are due fire in one turn.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine


class DeadlockError(Exception):
    """Everybody waits, and no timer will wake anybody."""


class _NoWaiting(selectors.SelectSelector):
    """Nothing ever arrives from outside; whoever waits for it lets time pass."""

    def __init__(self, pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._pass_time(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Owner of the clock."""

    def __init__(self) -> None:
        self._now_s = 0.0
        # For how much of that the process was stopped.
        self.paused_s = 0.0
        super().__init__(_NoWaiting(self._wait))

    def time(self) -> float:
        return self._now_s

    def pause(self, seconds: float) -> None:
        """Stops the process for so long, beginning now."""
        self._now_s += seconds
        self.paused_s += seconds

    def run_to_end(self, main: Coroutine[None, None, None]) -> None:
        """Runs `main`, ends whatever it has left, and closes the loop."""
        try:
            self.run_until_complete(main)
        finally:
            self.run_until_complete(_end_others())
            self.run_until_complete(self.shutdown_asyncgens())
            self.close()

    def _wait(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            raise DeadlockError
        self._now_s += timeout_s


def innermost(error: BaseException) -> BaseException:
    """What failed, of the tasks of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
