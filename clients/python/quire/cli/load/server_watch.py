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
from quire.cli.status import growth
from quire.v1 import executor_pb2

# The status will not become available later.
_PERMANENT_FAILURES = ("PERMISSION_DENIED", "UNIMPLEMENTED")


@dataclass(frozen=True, slots=True)
class Reading:
    """The status at one time, `at_s` after the start of the run."""

    at_s: float
    status: executor_pb2.GetStatusResponse
    # CPU usage of this machine since the previous reading, as a share of all cores.
    machine_cpu: float

    @property
    def occupancy(self) -> float | None:
        """The share of pages in use."""
        pools = [worker.pool for worker in self.status.workers]
        return _share(sum(pool.pages_referenced for pool in pools), sum(pool.pages_total for pool in pools))


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
                    self.readings.append(Reading(at_s, status, psutil.cpu_percent() / 100))
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
    same = [grown for pair in inside if (grown := _grown(*pair)) is not None]
    total = sum(same, Counter[str]())
    after_all = [after for _, after in inside]
    occupancy = [reading.occupancy for reading in after_all if reading.occupancy is not None]
    in_flight = [reading.status.operations_in_flight for reading in after_all]
    first, last = inside[0][0], inside[-1][1]
    return {
        "steps": total["steps"],
        "mean_batch": _share(total["batch_items"], total["steps"]),
        "largest_batch": max((b for pair in inside if (b := batch(*pair)) is not None), default=None),
        "tokens_per_step": _share(total["step_tokens"], total["steps"]),
        "prefix_hit_share": _share(total["prefix_hit_tokens"], total["prefix_query_tokens"]),
        "occupancy_mean": sum(occupancy) / len(occupancy) if occupancy else None,
        "occupancy_max": max(occupancy, default=None),
        "in_flight_mean": sum(in_flight) / len(in_flight),
        "in_flight_max": max(in_flight),
        # The increase for each reason.
        "refusals": dict(Counter(last.status.refusals) - Counter(first.status.refusals)),
        "workers_replaced": len(inside) - len(same),
        "machine_cpu": sum(reading.machine_cpu for reading in after_all) / len(after_all),
    }


def batch(before: Reading, after: Reading) -> float | None:
    """The mean batch size between two readings of the same workers, or None without steps."""
    grown = _grown(before, after)
    return None if grown is None else _share(grown["batch_items"], grown["steps"])


def _grown(before: Reading, after: Reading) -> Counter[str] | None:
    """What the counters of all workers have grown by. None: one was replaced, whose counters begin at 0."""
    counts = [*growth(after.status, before.status).values()]
    known = [count for count in counts if count is not None]
    return sum(known, Counter[str]()) if len(known) == len(counts) else None


def _share(part: float, whole: float) -> float | None:
    """The quotient, or None if `whole` is 0."""
    return part / whole if whole else None
