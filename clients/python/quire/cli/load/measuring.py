"""Measurements of one client process: the tokens of each request, and the delays of the process itself.

All times are seconds from the start of the run, on the monotonic clock that all processes share.
"""

from __future__ import annotations

import asyncio
import resource
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.cli.load.workload import Request

Clock = Callable[[], float]

# Error values of requests that did not finish, in addition to the server's reasons.
UNFINISHED = "UNFINISHED"  # not finished within the grace period
CUT_OFF = "CUT_OFF"  # the run was stopped


@dataclass(slots=True)
class Record:
    """One request, and when its tokens arrived. Latencies count from `intended_s`, not from `sent_s`."""

    index: int
    prompt_tokens: int
    intended_s: float
    sent_s: float | None = None
    # Arrival time and token count of each message with tokens.
    times_s: array[float] = field(default_factory=lambda: array("d"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    # When the request ended, and the reason if it failed.
    end_s: float | None = None
    error: str = ""

    @property
    def is_done(self) -> bool:
        return self.end_s is not None and not self.error


class Probe:
    """Records one request while it runs."""

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

    def received(self, count: int) -> None:
        """A message with `count` tokens has arrived."""
        record = self.record
        record.times_s.append(self._clock())
        record.counts.append(count)
        self._on_tokens(record)

    def done(self) -> None:
        """All tokens have arrived."""
        self.record.end_s = self.record.times_s[-1] if self.record.times_s else self._clock()

    def failed(self, reason: str) -> None:
        """The request has failed. No effect if it has ended."""
        if self.record.end_s is None:
            self.record.end_s = self._clock()
            self.record.error = reason


@dataclass(slots=True)
class ProcessLoad:
    """The load of a client process: delays of its event loop in seconds, and its share of one core."""

    lags_s: array[float] = field(default_factory=lambda: array("d"))
    cpu: float = 0.0


class SelfWatch:
    """Measures the delays of the current event loop, from now until `end`."""

    _INTERVAL_S = 0.01

    def __init__(self) -> None:
        self._load = ProcessLoad()
        self._began_s, self._began_cpu_s = time.monotonic(), _cpu_s()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def end(self) -> ProcessLoad:
        """Returns the measurements. The CPU share is 0 if the time was too short."""
        self._task.cancel()
        wall_s = time.monotonic() - self._began_s
        self._load.cpu = (_cpu_s() - self._began_cpu_s) / wall_s if wall_s > self._INTERVAL_S else 0.0
        return self._load

    async def _watch(self) -> None:
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(self._INTERVAL_S)
            self._load.lags_s.append(max(0.0, time.monotonic() - before_s - self._INTERVAL_S))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
