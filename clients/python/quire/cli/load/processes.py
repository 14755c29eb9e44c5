"""The client processes of a load test: starts them by exec, has them run plans, and ends them.

A process is limited by its event loop, so several are needed to use all cores. Each has its own channel.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Barrier, Event
from threading import BrokenBarrierError
from typing import Any, Self, TypeVar

import grpc
import uvloop
from quire import AsyncClient
from quire.cli.connecting import new_client
from quire.cli.load.drivers import Driver, new_driver
from quire.cli.load.generator import Generator, Plan
from quire.cli.load.measuring import Clock, ProcessLoad, Record, SelfWatch
from quire.cli.load.run_spec import RunSpec
from quire.cli.terminal import CommandFailed
from quire.v1 import executor_pb2

_CONNECT_TIMEOUT_S = 30.0
_MAX_REQUEST_BYTES = 64 << 20
# How often a process looks whether it is to stop.
_POLL_S = 0.1
_Result = TypeVar("_Result")


class ClientProcesses:
    """The client processes. Entering its `async with` waits until all are connected."""

    def __init__(self, spec: RunSpec, max_calls: int) -> None:
        """The calling process must ignore SIGINT, which they inherit."""
        context = multiprocessing.get_context("spawn")
        self._numbers = range(spec.plan.processes)
        # The time.monotonic() at which they were stopped.
        self.stopped_s: float | None = None
        self._stop = context.Event()
        # Each of them has one part of a run, since none begins before all are there.
        self._together = context.Barrier(spec.plan.processes)
        shared = (spec, max_calls, self._stop, self._together)
        self._pool = ProcessPoolExecutor(len(self._numbers), context, initializer=_begin, initargs=shared)

    async def __aenter__(self) -> Self:
        """Raises CommandFailed."""
        try:
            await self._in_each(_connect)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the processes."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """Stops what they run."""
        self._stop.set()
        self.stopped_s = time.monotonic()

    async def run(self, plan: Plan, start_s: float) -> tuple[list[Record], list[ProcessLoad]]:
        """Runs a plan from `start_s` of time.monotonic(), until its end or until it is stopped.

        Raises CommandFailed.
        """
        parts = await self._in_each(_run, plan, start_s)
        return [record for records, _ in parts for record in records], [load for _, load in parts]

    async def _in_each(self, work: Callable[..., _Result], *arguments: object) -> list[_Result]:
        """What all processes return. Raises CommandFailed."""
        loop = asyncio.get_running_loop()
        parts = [loop.run_in_executor(self._pool, work, number, *arguments) for number in self._numbers]
        try:
            return await asyncio.gather(*parts)
        except BrokenProcessPool:
            raise CommandFailed("a client process has ended") from None


class _Process:
    """What a client process has as long as it lives."""

    def __init__(self, spec: RunSpec, max_calls: int, stop: Event, together: Barrier) -> None:
        self.spec, self.max_calls, self.stop, self._together = spec, max_calls, stop, together
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.driver: Driver | None = None

    def wait_for_others(self) -> None:
        """Raises CommandFailed if one of them did not come."""
        try:
            self._together.wait(_CONNECT_TIMEOUT_S)
        except BrokenBarrierError:
            raise CommandFailed("a client process has not started") from None

    async def connect(self) -> None:
        """Raises CommandFailed."""
        limits = {"timeout_s": self.spec.timeout_s, "max_request_bytes": _MAX_REQUEST_BYTES}
        client = new_client(AsyncClient, self.spec.connection, **limits)
        request, metadata = executor_pb2.GetCapabilitiesRequest(), client.metadata
        try:
            await client.stub.GetCapabilities(
                request, timeout=_CONNECT_TIMEOUT_S, metadata=metadata, wait_for_ready=True
            )
        except grpc.RpcError:
            self._together.abort()
            target = self.spec.connection["target"]
            raise CommandFailed(f"no connection to {target} in {_CONNECT_TIMEOUT_S:.0f} s") from None
        self.driver = new_driver(self.spec.mode, client, max(1, self.max_calls))

    async def run(self, generator: Generator, plan: Plan, clock: Clock) -> ProcessLoad:
        """Runs until the end of the plan, or until it is to stop. Returns the load of this process."""

        async def stop_generator() -> None:
            while not self.stop.is_set():  # noqa: ASYNC110 - it is set by another process
                await asyncio.sleep(_POLL_S)
            generator.stop()

        async def wait_until(at_s: float) -> None:
            await asyncio.wait({work}, timeout=at_s - clock())

        stopping, work = asyncio.create_task(stop_generator()), asyncio.create_task(generator.run())
        try:
            await wait_until(plan.warm_up_s)
            watch = SelfWatch()
            # Do not measure the load while it only waits for unfinished requests.
            await wait_until(plan.end_s)
            load = watch.end()
            await work
            return load
        finally:
            stopping.cancel()


# In a client process: itself.
_own: list[_Process] = []


def _begin(*shared: Any) -> None:
    """Begins a client process."""
    # A terminal sends Ctrl-C to all processes. The main process handles it and stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _own.append(_Process(*shared))


def _connect(_number: int) -> None:
    (process,) = _own
    process.runner.run(process.connect())
    # Loaded modules are permanent. Exclude them from garbage collections, which would delay requests.
    gc.collect()
    gc.freeze()
    process.wait_for_others()


def _run(number: int, plan: Plan, start_s: float) -> tuple[list[Record], ProcessLoad]:
    """Runs the part of a plan that has this number."""
    (process,) = _own
    process.wait_for_others()

    def clock() -> float:
        return time.monotonic() - start_s

    assert process.driver is not None, "it is connected"
    generator = Generator(plan, number, process.driver, clock)
    load = process.runner.run(process.run(generator, plan, clock))
    return generator.records, load
