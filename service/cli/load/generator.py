"""Sends one process's share of the requests when they are due, and keeps the records.

Open loop: a request is sent at its intended time whatever became of those before, and its latencies count
from that time, so that a server (or a client) that stalls is charged for all that the stall kept waiting.
Closed loop: a caller begins its next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from service.cli.load.arrivals import Kind, arrivals
from service.cli.load.drivers import Driver
from service.cli.load.measuring import CUT_OFF, UNFINISHED, Clock, Probe, Record
from service.cli.load.workload import Workload


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast requests begin: `rate` a second, `callers` at a time, or, with neither, as the trace says."""

    rate: float | None = None
    arrivals: Kind = "poisson"
    callers: int | None = None

    @property
    def is_open(self) -> bool:
        """Requests begin whether others have ended or not."""
        return self.callers is None


@dataclass(frozen=True, slots=True)
class Plan:
    """A run, as all processes know it."""

    workload: Workload
    pace: Pace
    warm_up_s: float
    duration_s: float
    # How long to wait for what is under way when no more requests begin.
    grace_s: float
    vocab_size: int
    # Tells the prompts of this run from those of others.
    run_id: str = ""
    # Sequences that one caller runs together.
    batch: int = 1
    processes: int = 1

    @property
    def end_s(self) -> float:
        """From then on no request begins."""
        return self.warm_up_s + self.duration_s


@dataclass(slots=True)
class Progress:
    """What has happened so far, and the latencies since somebody last took them."""

    begun: int = 0
    ended: int = 0
    failed: int = 0
    tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def take(self) -> Progress:
        """A copy, from which on latencies are collected anew."""
        taken = Progress(self.begun, self.ended, self.failed, self.tokens, self.ttfts_s, self.gaps_s)
        self.ttfts_s, self.gaps_s = [], []
        return taken


# Beyond that a moment's latencies are a sample of them.
_MAX_LIVE = 1000
_PAUSE_AFTER_FAILURE_S = 0.1


class Generator:
    """Runs process number `process` of a plan. `clock` is 0 at the start of the run."""

    def __init__(self, plan: Plan, process: int, driver: Driver, clock: Clock) -> None:
        self.records: list[Record] = []
        self.progress = Progress()
        self._plan = plan
        self._process = process
        self._driver = driver
        self._clock = clock
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Ends the run: nothing begins any more, and what is under way is cut off."""
        self._stopped.set()

    async def run(self) -> None:
        """Until everything has ended, or `grace_s` have passed since the last could begin. Call it once."""
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
        """Number and time of each group of sequences that this process begins in open loop."""
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
                # Made before they are due, as making them takes a moment.
                probes = self._probes(group, at_s)
                while (left_s := at_s - self._clock()) > 0:  # noqa: ASYNC110 - no event tells the time
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
            # Who is refused at once, or finds nobody there, does not come again at once.
            if all(probe.record.error for probe in probes):
                await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)

    def _probes(self, group: int, at_s: float) -> list[Probe]:
        plan = self._plan
        workload, size = plan.workload, plan.batch
        probes = []
        for index in range(group * size, group * size + size):
            request = workload.request(index)
            prompt = workload.prompt(request, plan.vocab_size, plan.run_id)
            probes.append(Probe(request, prompt, at_s, self._clock, self._took))
        return probes

    def _begin(self, probes: Sequence[Probe]) -> None:
        self.records += [probe.record for probe in probes]
        self.progress.begun += len(probes)

    async def _run(self, probes: Sequence[Probe]) -> None:
        try:
            await self._driver.run(probes)
        finally:
            self.progress.ended += len(probes)
            self.progress.failed += sum(bool(probe.record.error) for probe in probes)

    def _took(self, record: Record) -> None:
        """Tokens came: for those who look on."""
        progress, times_s = self.progress, record.times_s
        progress.tokens += record.counts[-1]
        if len(times_s) == 1 and len(progress.ttfts_s) < _MAX_LIVE:
            progress.ttfts_s.append(times_s[0] - record.intended_s)
        elif len(times_s) > 1 and len(progress.gaps_s) < _MAX_LIVE:
            progress.gaps_s.append(times_s[-1] - times_s[-2])
