"""Polls the server's status during a run, and computes figures from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil
from quire import AsyncClient, QuireError
from quire.cli.connecting import CONTROL_TIMEOUT_S, new_client
from quire.v1 import executor_pb2

# Counters of StepCounts, then counters and gauges of PoolUsage.
_STEPS = ("steps", "batch_items", "step_tokens")
_PREFIXES = ("prefix_hit_tokens", "prefix_query_tokens")
_POOLS = (*_PREFIXES, "pages_referenced", "pages_total")
# The status will not become available later.
_PERMANENT_FAILURES = ("PERMISSION_DENIED", "UNIMPLEMENTED")


@dataclass(frozen=True, slots=True)
class Reading:
    """The status at one time, `at_s` after the start of the run."""

    at_s: float
    # Sums over all workers of _STEPS and _POOLS.
    sums: Mapping[str, int]
    in_flight: int
    refusals: Mapping[str, int]
    # The epoch of each worker. Counters restart at 0 in a new process.
    epochs: tuple[tuple[str, int], ...]
    # CPU usage of this machine since the previous reading, as a share of all cores.
    machine_cpu: float

    @classmethod
    def of(cls, status: executor_pb2.GetStatusResponse, at_s: float, machine_cpu: float) -> Reading:
        """Makes a reading from a status."""
        sums: Counter[str] = Counter()
        for worker in status.workers:
            sums.update({name: getattr(worker.counts, name) for name in _STEPS})
            sums.update({name: getattr(worker.pool, name) for name in _POOLS})
        epochs = tuple((worker.worker_id, worker.epoch) for worker in status.workers)
        return cls(at_s, sums, status.operations_in_flight, dict(status.refusals), epochs, machine_cpu)

    @property
    def occupancy(self) -> float | None:
        """The share of pages in use."""
        return share(self.sums["pages_referenced"], self.sums["pages_total"])


@dataclass(slots=True)
class ServerWatch:
    """Polls the status within its `async with`, and appends to `readings`."""

    connection: Mapping[str, Any]
    interval_s: float
    start_s: float
    readings: list[Reading] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        psutil.cpu_percent()
        async with new_client(AsyncClient, self.connection, timeout_s=CONTROL_TIMEOUT_S) as client:
            while True:
                try:
                    status = await client.status()
                except QuireError as error:
                    # Other errors may be temporary, such as during a restart of the server.
                    if error.code.name in _PERMANENT_FAILURES:
                        return
                else:
                    at_s = time.monotonic() - self.start_s
                    self.readings.append(Reading.of(status, at_s, psutil.cpu_percent() / 100))
                await asyncio.sleep(self.interval_s)


def server_figures(begin_s: float, end_s: float, readings: Sequence[Reading]) -> dict[str, Any] | None:
    """Figures from the server's counters. None: there are no readings."""
    inside = [
        (before, after)
        for before, after in itertools.pairwise(readings)
        if after.at_s > begin_s and before.at_s < end_s
    ]
    if not inside:
        return None
    # The counters of a replaced worker restart at 0.
    same = [(before, after) for before, after in inside if before.epochs == after.epochs]
    grown = {
        name: sum(after.sums[name] - before.sums[name] for before, after in same)
        for name in (*_STEPS, *_PREFIXES)
    }
    after_all = [after for _, after in inside]
    occupancy = [reading.occupancy for reading in after_all if reading.occupancy is not None]
    first, last = inside[0][0], inside[-1][1]
    return {
        "steps": grown["steps"],
        "mean_batch": share(grown["batch_items"], grown["steps"]),
        "largest_batch": max((b for pair in same if (b := batch(*pair)) is not None), default=None),
        "tokens_per_step": share(grown["step_tokens"], grown["steps"]),
        "prefix_hit_share": share(grown["prefix_hit_tokens"], grown["prefix_query_tokens"]),
        "occupancy_mean": sum(occupancy) / len(occupancy) if occupancy else None,
        "occupancy_max": max(occupancy, default=None),
        "in_flight_mean": sum(r.in_flight for r in after_all) / len(after_all),
        "in_flight_max": max(r.in_flight for r in after_all),
        # The increase for each reason.
        "refusals": dict(Counter(last.refusals) - Counter(first.refusals)),
        "workers_replaced": len(inside) - len(same),
        "machine_cpu": sum(r.machine_cpu for r in after_all) / len(after_all),
    }


def share(part: float, whole: float) -> float | None:
    """The quotient, or None if `whole` is 0."""
    return part / whole if whole else None


def batch(before: Reading, after: Reading) -> float | None:
    """The mean batch size between two readings of the same workers, or None without steps."""
    if before.epochs != after.epochs:
        return None
    steps = after.sums["steps"] - before.sums["steps"]
    return share(after.sums["batch_items"] - before.sums["batch_items"], steps)
