"""What the server says of itself during a run: GetStatus, asked again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import psutil
from quire.v1 import executor_pb2, executor_pb2_grpc

from service.cli.channel import CONTROL_TIMEOUT_S
from service.cli.load.connecting import Server, Stub
from service.cli.load.session_calls import failure_reason


@dataclass(frozen=True, slots=True)
class Reading:
    """The sums over all workers at one moment, `at_s` after the start of the run."""

    at_s: float
    steps: int
    batch_items: int
    step_tokens: int
    in_flight: int
    sequences: int
    pages_used: int
    pages_total: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    refusals: dict[str, int]
    # Of the worker processes: a new one counts from 0 again.
    epochs: tuple[tuple[str, int], ...]
    # Share of all cores of this machine that was busy since the reading before.
    machine_cpu: float


@dataclass(slots=True)
class ServerWatch:
    """Reads until it is cancelled. What was read is in `readings`; `trouble` says why there is nothing."""

    server: Server
    interval_s: float
    start_s: float
    readings: list[Reading] = field(default_factory=list)
    trouble: str = ""

    async def run(self) -> None:
        """Until cancelled, or until the server refuses to tell."""
        psutil.cpu_percent()
        channel = self.server.connect()
        stub: Stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        try:
            while not self.trouble:
                await self._read(stub)
                await asyncio.sleep(self.interval_s)
        finally:
            await channel.close()

    async def _read(self, stub: Stub) -> None:
        try:
            status = await stub.GetStatus(
                executor_pb2.GetStatusRequest(), timeout=CONTROL_TIMEOUT_S, metadata=self.server.metadata
            )
        except grpc.RpcError as error:
            call: Any = error
            # Others pass: a server that is started again answers again.
            if call.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED):
                self.trouble = failure_reason(error)
            return
        self.readings.append(reading(status, time.monotonic() - self.start_s, psutil.cpu_percent() / 100))


def reading(status: executor_pb2.GetStatusResponse, at_s: float, machine_cpu: float) -> Reading:
    """The sums of a status."""
    workers = status.workers
    pools, counts = [w.pool for w in workers], [w.counts for w in workers]
    return Reading(
        at_s=at_s,
        steps=sum(count.steps for count in counts),
        batch_items=sum(count.batch_items for count in counts),
        step_tokens=sum(count.step_tokens for count in counts),
        in_flight=status.operations_in_flight,
        sequences=sum(pool.sequences for pool in pools),
        pages_used=sum(pool.pages_referenced for pool in pools),
        pages_total=sum(pool.pages_total for pool in pools),
        prefix_hit_tokens=sum(pool.prefix_hit_tokens for pool in pools),
        prefix_query_tokens=sum(pool.prefix_query_tokens for pool in pools),
        refusals=dict(status.refusals),
        epochs=tuple((worker.worker_id, worker.epoch) for worker in workers),
        machine_cpu=machine_cpu,
    )


@contextlib.asynccontextmanager
async def watching(watch: ServerWatch) -> Any:
    """Reads while the block runs."""
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
