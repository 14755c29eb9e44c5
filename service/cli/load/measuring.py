"""What one client process sees: the tokens of each request, and how late the process itself is.

All times are seconds from the start of the run, on the clock that the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from service.cli.load.workload import Request

Clock = Callable[[], float]

# How a request ended that did not come to its last token, beside the reasons of the server.
UNFINISHED = "UNFINISHED"  # the run gave up waiting for it
CUT_OFF = "CUT_OFF"  # somebody ended the run


@dataclass(slots=True)
class Record:
    """One request, and when its tokens came. Latencies count from `intended_s`, whenever it was sent."""

    index: int
    prompt_tokens: int
    intended_s: float
    sent_s: float | None = None
    # Of each message that brought tokens: when, and how many.
    times_s: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    reused_tokens: int = 0
    # When it ended, and why if it failed.
    end_s: float | None = None
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.end_s is not None and not self.error


class Probe:
    """Writes the record of one request while it runs. A driver holds one for each."""

    __slots__ = ("_clock", "_on_tokens", "prompt", "record", "request")

    def __init__(
        self,
        request: Request,
        prompt: list[int],
        intended_s: float,
        clock: Clock,
        on_tokens: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.record = Record(request.index, request.prompt_tokens, intended_s)
        self._clock = clock
        self._on_tokens = on_tokens

    def sent(self) -> None:
        """The first call is about to be made."""
        self.record.sent_s = self._clock()

    def took(self, count: int, reused_tokens: int = 0) -> None:
        """A message has brought so many tokens."""
        record = self.record
        record.times_s.append(self._clock())
        record.counts.append(count)
        record.reused_tokens += reused_tokens
        self._on_tokens(record)

    def done(self) -> None:
        """All tokens have come."""
        self.record.end_s = self.record.times_s[-1] if self.record.times_s else self._clock()

    def failed(self, reason: str) -> None:
        """It ends here. Nothing happens to one that has ended."""
        if self.record.end_s is None:
            self.record.end_s = self._clock()
            self.record.error = reason


@dataclass(slots=True)
class ProcessLoad:
    """How busy a client process was: seconds by which its event loop was late, and its share of one core."""

    lags_s: array[float] = field(default_factory=lambda: array("d"))
    cpu: float = 0.0


class SelfWatch:
    """Watches the event loop that it runs in, from `begin` to `end`."""

    _INTERVAL_S = 0.01

    def __init__(self) -> None:
        self.load = ProcessLoad()
        self._task: asyncio.Task[None] | None = None
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """Forgets what was before."""
        self.load = ProcessLoad()
        self._began = (time.monotonic(), _cpu_s())
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def end(self) -> ProcessLoad:
        """What was seen."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        wall_s = time.monotonic() - self._began[0]
        self.load.cpu = (_cpu_s() - self._began[1]) / wall_s if wall_s > 0 else 0.0
        return self.load

    async def _watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(self._INTERVAL_S)
            self.load.lags_s.append(max(0.0, time.monotonic() - before_s - self._INTERVAL_S))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
