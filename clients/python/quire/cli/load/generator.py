"""Sends one process's share of the requests at their intended times, and records the results.

Open loop: a request is sent at its intended time, regardless of earlier requests. Its latencies count from
that time, so that a stall of the server or the client counts for every delayed request. Closed loop: a caller
starts its next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from quire.cli.load.drivers import Driver
from quire.cli.load.measuring import CUT_OFF, UNFINISHED, Clock, Probe, Record
from quire.cli.load.workload import Workload

Kind: TypeAlias = Literal["poisson", "constant"]

# The maximum number of latencies in one progress report.
_MAX_LIVE = 1000
_PAUSE_AFTER_FAILURE_S = 0.1


def arrivals(kind: Kind, rate: float, seed: int) -> Iterator[float]:
    """An infinite sequence of start times with a mean rate of `rate` per second. Deterministic in the seed.

    Either a Poisson process, as of independent callers, or constant intervals from 0 on.
    """
    if kind == "constant":
        # A running sum would accumulate rounding errors.
        yield from (index / rate for index in itertools.count())
    draws = random.Random(f"arrivals {seed}")
    yield from itertools.accumulate(draws.expovariate(rate) for _ in itertools.repeat(None))


@dataclass(frozen=True, slots=True)
class Pace:
    """The arrival process: `rate` requests a second, `callers` at a time, or else a trace's times."""

    rate: float | None = None
    arrivals: Kind = "poisson"
    callers: int | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests start independently of the end of others."""
        return self.callers is None


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a run, which all processes share."""

    workload: Workload
    pace: Pace
    warm_up_s: float
    duration_s: float
    # How long to wait for unfinished requests at the end.
    grace_s: float
    vocab_size: int = 0
    # Makes the prompts of this run different from those of other runs.
    run_id: str = ""
    # Sequences that one caller runs together.
    batch: int = 1
    processes: int = 1

    @property
    def end_s(self) -> float:
        """The time after which no request starts."""
        return self.warm_up_s + self.duration_s


@dataclass(slots=True)
class Progress:
    """Events since the last `take_progress`."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


class Generator:
    """Runs process number `process` of a plan. `clock` is 0 at the start of the run."""

    def __init__(self, plan: Plan, process: int, driver: Driver, clock: Clock) -> None:
        self.records: list[Record] = []
        self._progress = Progress()
        self._plan = plan
        self._process = process
        self._driver = driver
        self._clock = clock
        self._stopped = asyncio.Event()

    def take_progress(self) -> Progress:
        """Returns the events since the last call."""
        taken, self._progress = self._progress, Progress()
        return taken

    def stop(self) -> None:
        """Stops the run: starts no more requests, and cuts off the running ones."""
        self._stopped.set()

    async def run(self) -> None:
        """Runs until all requests have ended, at most until `grace_s` after the last start. Call it once."""
        open_loop = self._plan.pace.is_open
        work = asyncio.create_task(self._open_loop() if open_loop else self._closed_loop())
        stop = asyncio.create_task(self._stopped.wait())
        give_up_s = self._plan.end_s + self._plan.grace_s
        try:
            await asyncio.wait(
                {work, stop}, timeout=give_up_s - self._clock(), return_when=asyncio.FIRST_COMPLETED
            )
            reason = CUT_OFF if self._stopped.is_set() else UNFINISHED
            for record in self.records:
                if record.end_s is None:
                    record.end_s, record.error = self._clock(), reason
        finally:
            for task in (work, stop):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work

    def _groups(self) -> Iterator[tuple[int, float]]:
        """Index and start time of each group of sequences that this process starts in an open loop."""
        plan = self._plan
        if plan.pace.rate is None:
            times: Iterator[float] = iter([line.at_s for line in plan.workload.trace])
        else:
            times = arrivals(plan.pace.arrivals, plan.pace.rate / plan.batch, plan.workload.seed)
        mine = itertools.islice(enumerate(times), self._process, None, plan.processes)
        return itertools.takewhile(lambda group: group[1] < plan.end_s, mine)

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group, at_s in self._groups():
                # Create the prompts in advance, because that takes time.
                probes = self._probes(group, at_s)
                # Also if it is late: others are to be sent, and the run is to end.
                await asyncio.sleep(0)
                while (left_s := at_s - self._clock()) > 0:  # noqa: ASYNC110 - there is no event for a time
                    await asyncio.sleep(left_s)
                self._begin(probes)
                tasks.create_task(self._run(probes))

    async def _closed_loop(self) -> None:
        plan = self._plan
        assert plan.pace.callers is not None, "a closed loop has callers"
        async with asyncio.TaskGroup() as tasks:
            for caller in range(self._process, plan.pace.callers, plan.processes):
                tasks.create_task(self._caller(caller, plan.pace.callers))

    async def _caller(self, caller: int, callers: int) -> None:
        # The clock is below 0 until the run starts.
        await asyncio.sleep(max(0.0, -self._clock()))
        for group in itertools.count(caller, callers):
            probes = self._probes(group, 0.0)
            now_s = self._clock()
            if now_s >= self._plan.end_s:
                return
            for probe in probes:
                probe.record.intended_s = now_s
            self._begin(probes)
            await self._run(probes)
            # Pause after failures, so that refusals or connection errors do not cause a busy loop.
            if all(probe.record.error for probe in probes):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    def _probes(self, group: int, at_s: float) -> list[Probe]:
        plan = self._plan
        workload, size = plan.workload, plan.batch
        probes = []
        for index in range(group * size, group * size + size):
            request = workload.request(index)
            prompt = workload.prompt(request, plan.vocab_size, plan.run_id)
            probes.append(Probe(request, prompt, at_s, self._clock, self._on_tokens))
        return probes

    def _begin(self, probes: Sequence[Probe]) -> None:
        self.records += [probe.record for probe in probes]
        self._progress.begun += len(probes)

    async def _run(self, probes: Sequence[Probe]) -> None:
        try:
            await self._driver.run(probes)
        finally:
            self._progress.ended += len(probes)
            self._progress.failed += sum(bool(probe.record.error) for probe in probes)

    def _on_tokens(self, record: Record) -> None:
        """Updates the progress report when tokens arrive."""
        progress, times_s = self._progress, record.times_s
        progress.tokens += record.counts[-1]
        if len(times_s) == 1 and len(progress.ttfts_s) < _MAX_LIVE:
            progress.ttfts_s.append(times_s[0] - record.intended_s)
        elif len(times_s) > 1 and len(progress.gaps_s) < _MAX_LIVE:
            progress.gaps_s.append(times_s[-1] - times_s[-2])
