"""The client processes: started by exec, told what to run, heard while they run, and ended.

One process sends what one event loop can; several, what a machine can. Each has a channel of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import multiprocessing
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from service.cli.load.connecting import Server
from service.cli.load.drivers import make_driver
from service.cli.load.generator import Generator, Plan, Progress
from service.cli.load.measuring import ProcessLoad, Record, SelfWatch

# From the moment that all processes are told to the start.
_LEAD_S = 0.2
_PROGRESS_S = 0.25
_CONNECT_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process needs before its first run."""

    server: Server
    mode: str
    timeout_s: float | None
    max_calls: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Told to a process: its share of a plan, which starts at `start_s` of time.monotonic()."""

    plan: Plan
    process: int
    start_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a process has to say of a run."""

    records: list[Record]
    load: ProcessLoad


class _Ready:
    """Said by a process that has its connection."""


class _Stop:
    """Told to a process: the run ends now."""


class ClientDied(Exception):
    """A client process ended, or could not connect; the message says why."""


class ClientProcesses:
    """A number of processes that connect as `setup` says. Use `with`, which ends them, and one event loop."""

    def __init__(self, setup: Setup, count: int) -> None:
        """Starts them. Whoever does has to let them inherit that Ctrl-C is ignored."""
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection[Any, Any]] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_process_main, args=(theirs, setup), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """They end when they see that nobody is there any more."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_END_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()

    async def wait_until_ready(self) -> None:
        """Until all have their connection. Raises ClientDied."""
        async with self._messages() as messages:
            for _ in self._processes:
                await messages.get_of(_Ready)

    async def run(
        self,
        plan: Plan,
        stopped: asyncio.Event,
        on_start: Callable[[float], None],
        on_progress: Callable[[int, Progress], None],
    ) -> list[Outcome]:
        """Runs a plan, until its end or until `stopped` is set. Raises ClientDied.

        `on_start` is told when it starts, by time.monotonic(), `on_progress` how it is with each process.
        """
        start_s = time.monotonic() + _LEAD_S
        on_start(start_s)
        for process, connection in enumerate(self._connections):
            connection.send(_Run(plan, process, start_s))
        stopper = asyncio.create_task(self._stop_when(stopped))
        outcomes: dict[int, Outcome] = {}
        try:
            async with self._messages() as messages:
                while len(outcomes) < len(self._processes):
                    process, message = await messages.get()
                    if isinstance(message, Progress):
                        on_progress(process, message)
                    elif isinstance(message, Outcome):
                        outcomes[process] = message
        finally:
            stopper.cancel()
        return [outcomes[process] for process in range(len(self._processes))]

    async def _stop_when(self, stopped: asyncio.Event) -> None:
        await stopped.wait()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(_Stop())

    @contextlib.asynccontextmanager
    async def _messages(self) -> AsyncIterator[_Messages]:
        messages = _Messages(self._connections)
        try:
            yield messages
        finally:
            messages.close()


class _Messages:
    """What the processes say, as it comes."""

    def __init__(self, connections: Sequence[Connection[Any, Any]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._connections = connections
        self._said: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        for process, connection in enumerate(connections):
            self._loop.add_reader(connection.fileno(), self._read, process, connection)

    def close(self) -> None:
        for connection in self._connections:
            self._loop.remove_reader(connection.fileno())

    async def get(self) -> tuple[int, Any]:
        """A process and what it said. Raises ClientDied."""
        process, message = await self._said.get()
        if isinstance(message, ClientDied):
            raise message
        return process, message

    async def get_of(self, kind: type) -> None:
        """Waits for the next message of a kind. Raises ClientDied."""
        while not isinstance((await self.get())[1], kind):
            pass

    def _read(self, process: int, connection: Connection[Any, Any]) -> None:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(connection.fileno())
            message = ClientDied(f"client process {process} has ended")
        self._said.put_nowait((process, message))


def _process_main(connection: Connection[Any, Any], setup: Setup) -> None:
    """The whole life of a client process."""
    import uvloop

    # As a terminal sends Ctrl-C to all processes; the first one tells the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with (
        # Whoever listened has gone.
        contextlib.suppress(BrokenPipeError),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(connection, setup))


async def _serve(connection: Connection[Any, Any], setup: Setup) -> None:
    """Does what it is told until nobody is there to tell it."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        message: Any = ""
        while message is not None:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                message = None
            with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits for it any more.
                loop.call_soon_threadsafe(told.put_nowait, message)

    channel = setup.server.connect()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await channel.channel_ready()
    except TimeoutError:
        connection.send(ClientDied(f"no connection to {setup.server.target} in {_CONNECT_TIMEOUT_S:.0f} s"))
        return
    driver = make_driver(setup.mode, channel, setup.server, setup.timeout_s, setup.max_calls)
    # A thread: an event loop that watched the connection would make it one that sends only what fits at once.
    threading.Thread(target=read, name="quire-load-orders", daemon=True).start()
    # What was loaded lives as long as the process; the collector need not look at it between two sends.
    gc.collect()
    gc.freeze()
    connection.send(_Ready())
    try:
        while (message := await told.get()) is not None:
            # One that was to stop a run that had ended by itself is nothing.
            if isinstance(message, _Run):
                generator = Generator(
                    message.plan,
                    message.process,
                    driver,
                    lambda: time.monotonic() - message.start_s,
                )
                if not await _run(generator, connection, told, message):
                    return
    finally:
        await driver.close()
        await channel.close()


async def _run(
    generator: Generator, connection: Connection[Any, Any], told: asyncio.Queue[Any], run: _Run
) -> bool:
    """Carries out a run and reports on it. False: nobody is there any more."""
    watch = SelfWatch()

    async def tell() -> None:
        await asyncio.sleep(max(0.0, run.start_s + run.plan.warm_up_s - time.monotonic()))
        watch.begin()

    async def report() -> None:
        while True:
            await asyncio.sleep(_PROGRESS_S)
            connection.send(generator.progress.take())

    work = asyncio.create_task(generator.run())
    helpers = [asyncio.create_task(tell()), asyncio.create_task(report())]
    order = asyncio.create_task(told.get())
    try:
        # Also busy while it only waits for what is under way, which is of no interest.
        end_s = run.start_s + run.plan.end_s - time.monotonic()
        await asyncio.wait({work, order}, timeout=end_s, return_when=asyncio.FIRST_COMPLETED)
        load = await watch.end()
        await asyncio.wait({work, order}, return_when=asyncio.FIRST_COMPLETED)
        if order.done():
            generator.stop()
        await work
        is_alone = order.done() and order.result() is None
        if not is_alone:
            connection.send(Outcome(generator.records, load))
    except OSError:
        # Whoever listened has gone.
        return False
    finally:
        for task in (*helpers, order, work):
            task.cancel()
    return not is_alone
