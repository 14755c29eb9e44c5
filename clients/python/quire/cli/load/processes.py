"""The client processes: starts them by exec, sends them runs, collects progress and results, and ends them.

A process is limited by its event loop, so several are needed to use all cores. Each has its own channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import grpc
from quire import AsyncClient
from quire.cli.connecting import new_client
from quire.cli.load.drivers import new_driver
from quire.cli.load.generator import Generator, Plan, Progress
from quire.cli.load.measuring import ProcessLoad, Record, SelfWatch
from quire.cli.load.run_spec import RunSpec
from quire.cli.terminal import CommandFailed
from quire.v1 import executor_pb2

_PROGRESS_S = 0.25
_CONNECT_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_MAX_REQUEST_BYTES = 64 << 20
# Sent by a process that is connected, and sent to a process to stop its run.
_READY, _STOP = "ready", "stop"


@dataclass(frozen=True, slots=True)
class _Run:
    """Sent to a process: its share of a plan, which starts at `start_s` of time.monotonic()."""

    plan: Plan
    process: int
    start_s: float

    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run. `stopped_s` is the time.monotonic() at which it was stopped."""

    records: list[Record]
    loads: list[ProcessLoad]
    stopped_s: float | None = None


class ClientProcesses:
    """The client processes of a run. Entering its `async with` waits until all are connected."""

    def __init__(self, spec: RunSpec, max_calls: int) -> None:
        """Starts the processes. The calling process must ignore SIGINT, which they inherit."""
        context = multiprocessing.get_context("spawn")
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._connections: list[Connection[Any, Any]] = []
        self._processes = []
        for number in range(spec.plan.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_process_main, args=(theirs, spec, max_calls), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
            self._loop.add_reader(ours.fileno(), self._read, number, ours)

    async def __aenter__(self) -> Self:
        """Raises CommandFailed."""
        try:
            for _ in self._processes:
                await self._next_message()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the pipes, upon which the processes exit; kills those that do not."""
        for connection in self._connections:
            self._loop.remove_reader(connection.fileno())
            connection.close()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()

    async def run(
        self, plan: Plan, start_s: float, stopped: asyncio.Event, on_progress: Callable[[Progress], None]
    ) -> Outcome:
        """Runs a plan from `start_s` of time.monotonic(), until its end or until `stopped` is set.

        Calls `on_progress` with progress reports. Raises CommandFailed.
        """
        for process, connection in enumerate(self._connections):
            connection.send(_Run(plan, process, start_s))
        stopper = asyncio.create_task(self._stop_when(stopped))
        outcomes: list[Outcome] = []
        try:
            while len(outcomes) < len(self._processes):
                message = await self._next_message()
                if isinstance(message, Outcome):
                    outcomes.append(message)
                else:
                    on_progress(message)
        finally:
            stopper.cancel()
        return Outcome(
            records=[record for outcome in outcomes for record in outcome.records],
            loads=[load for outcome in outcomes for load in outcome.loads],
            stopped_s=stopper.result() if stopper.done() else None,
        )

    async def _stop_when(self, stopped: asyncio.Event) -> float:
        await stopped.wait()
        stopped_s = time.monotonic()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(_STOP)
        return stopped_s

    async def _next_message(self) -> Any:
        """The next message of any process. Raises CommandFailed."""
        message = await self._messages.get()
        if isinstance(message, CommandFailed):
            raise message
        return message

    def _read(self, process: int, connection: Connection[Any, Any]) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(connection.fileno())
            message = CommandFailed(f"client process {process} has ended")
        self._messages.put_nowait(message)


def _process_main(connection: Connection[Any, Any], spec: RunSpec, max_calls: int) -> None:
    """The main function of a client process."""
    import uvloop  # noqa: PLC0415 - only for the child processes; the main one handles signals

    # A terminal sends Ctrl-C to all processes. The main process handles it and stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        # The main process has exited.
        contextlib.suppress(BrokenPipeError, ConnectionResetError),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(connection, spec, max_calls))


async def _serve(connection: Connection[Any, Any], spec: RunSpec, max_calls: int) -> None:
    """Runs the plans that it receives until the connection closes."""
    limits = {"timeout_s": spec.timeout_s, "max_request_bytes": _MAX_REQUEST_BYTES}
    async with new_client(AsyncClient, spec.connection, **limits) as client:
        try:
            await client.stub.GetCapabilities(
                executor_pb2.GetCapabilitiesRequest(),
                timeout=_CONNECT_TIMEOUT_S,
                metadata=client.metadata,
                wait_for_ready=True,
            )
        except grpc.RpcError:
            target = spec.connection["target"]
            connection.send(CommandFailed(f"no connection to {target} in {_CONNECT_TIMEOUT_S:.0f} s"))
            return
        driver = new_driver(spec.mode, client, max(1, max_calls))
        # Loaded modules are permanent. Exclude them from garbage collections, which would delay requests.
        gc.collect()
        gc.freeze()
        connection.send(_READY)
        order = _next_order(connection)
        while (message := await order) is not None:
            order = _next_order(connection)
            # Ignore a stop for a run that has already ended.
            if isinstance(message, _Run):
                generator = Generator(message.plan, message.process, driver, message.clock)
                await _run(generator, connection, order, message)


def _next_order(connection: Connection[Any, Any]) -> asyncio.Future[Any]:
    """The next message of the main process; None when it has closed the connection."""
    loop = asyncio.get_running_loop()
    order: asyncio.Future[Any] = loop.create_future()

    def receive() -> None:
        message: Any = None
        try:
            with contextlib.suppress(EOFError, OSError):
                message = connection.recv()
        finally:
            with contextlib.suppress(RuntimeError):  # The loop is closed.
                loop.call_soon_threadsafe(order.set_result, message)

    # In a thread: an event loop would make the connection non-blocking, and large messages would fail. Not in
    # the loop's executor: a process that fails would wait for the next message before it ends.
    threading.Thread(target=receive, name="quire-load-orders", daemon=True).start()
    return order


async def _run(
    generator: Generator, connection: Connection[Any, Any], order: asyncio.Future[Any], run: _Run
) -> None:
    """Performs a run, until its end or the next order, and sends its results."""

    async def report() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            connection.send(generator.take_progress())

    async def wait_until(at_s: float | None) -> None:
        """Waits until `at_s` after the start, or until the run ends or is stopped."""
        timeout_s = None if at_s is None else at_s - run.clock()
        await asyncio.wait({work, order}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    work = asyncio.create_task(generator.run())
    reporting = asyncio.create_task(report())
    try:
        await wait_until(run.plan.warm_up_s)
        watch = SelfWatch()
        # Do not measure the load while it only waits for unfinished requests.
        await wait_until(run.plan.end_s)
        load = watch.end()
        await wait_until(None)
        if order.done():
            generator.stop()
        await work
        connection.send(Outcome(generator.records, [load]))
    finally:
        reporting.cancel()
        work.cancel()
