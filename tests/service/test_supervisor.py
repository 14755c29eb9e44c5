"""Workers are started, watched and replaced, wherever a launcher runs them: here in this process."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import structlog
from quire.v1 import executor_pb2, types_pb2, worker_pb2, worker_pb2_grpc

from service.caches.effects import Claim, Event, ReleaseSequences
from service.config import Config
from service.pool import supervisor as supervisor_module
from service.pool.base import PoolFailed, WorkerSlot
from service.pool.launcher import Adopted
from service.pool.supervisor import EXIT_CONFIG, Supervisor

Requests = AsyncIterator[worker_pb2.ConnectRequest]
Behaviour = Callable[[Requests], AsyncIterator[worker_pb2.ConnectResponse]]


def ready(fingerprint: str = "one") -> worker_pb2.ConnectResponse:
    message = worker_pb2.WorkerReady(
        pages_total=8,
        executor=types_pb2.ExecutorCapabilities(page_size_tokens=16),
        model=types_pb2.ModelDescription(fingerprint=fingerprint),
    )
    return worker_pb2.ConnectResponse(events=[worker_pb2.WorkerEvent(ready=message)], pages_available=8)


async def works(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Is ready, and says that it lives, and that it has done what it was told."""
    yield ready()
    async for request in requests:
        events = []
        for command in request.commands:
            event = worker_pb2.WorkerEvent(op_id=command.op_id)
            if command.HasField("snapshot"):
                event.snapshot.SetInParent()
            else:
                event.done.SetInParent()
            events.append(event)
        yield worker_pb2.ConnectResponse(events=events, pages_available=8)


async def hangs(_requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Is ready, and silent from then on."""
    yield ready()
    await asyncio.get_running_loop().create_future()


async def serves_another_model(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Is ready and well, with files that were replaced meanwhile."""
    yield ready("two")
    async for _ in requests:
        yield worker_pb2.ConnectResponse()


async def loads(_requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Is not ready yet."""
    yield worker_pb2.ConnectResponse()
    await asyncio.get_running_loop().create_future()


async def gives_up(_requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Ends its stream before it is ready."""
    never: list[worker_pb2.ConnectResponse] = []
    for response in never:
        yield response


_SERVERS: list[grpc.aio.Server] = []


@pytest.fixture(autouse=True)
async def servers_end_with_the_test() -> AsyncIterator[None]:
    """Also those whose start was cancelled. One that outlives its event loop complains in a later test."""
    yield
    while _SERVERS:
        await _SERVERS.pop().stop(None)


class Processes(worker_pb2_grpc.WorkerServiceServicer):
    """An incarnation. Its process ends when it is ended, or as the test says; the stream may end before."""

    def __init__(self, address: str, epoch: int, behave: Behaviour, status: int) -> None:
        self.address = address
        self.pid = 1000 + epoch
        self.secret = "open sesame"
        self.epoch = epoch
        self.grace_s: float | None = None
        self.was_killed = self.was_left = False
        self._behave = behave
        self._status = status
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._server = grpc.aio.server()
        _SERVERS.append(self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(address)

    async def serve(self) -> None:
        await self._server.start()

    async def Connect(  # type: ignore[override]  # grpc.aio's other style: it writes by itself
        self, request_iterator: Requests, context: grpc.aio.ServicerContext[object, object]
    ) -> None:
        async for response in self._behave(request_iterator):
            await context.write(response)

    def exit(self) -> None:
        if not self._exit.done():
            self._exit.set_result(self._status)

    async def ended(self) -> int:
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        self.was_killed = True

    def leave(self) -> None:
        self.was_left = True

    async def end(self, *, grace_s: float) -> int:
        self.grace_s = grace_s
        self.exit()
        await self._server.stop(None)
        return await self._exit


MODEL = "/where/models/are"


class FakeLauncher:
    """Starts what the test has planned: one behaviour, or one error, for each incarnation."""

    def __init__(self, directory: Path, *plan: Behaviour | Exception, status: int = 0) -> None:
        self.started: list[Processes] = []
        # What an earlier gateway has left.
        self.left: dict[str, Adopted] = {}
        self.last_epoch = 0
        self.attempts = 0
        self.closed = False
        self._directory = directory
        self._plan = plan
        self._status = status

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, Adopted]:
        return self.left

    async def start(self, config: worker_pb2.WorkerConfig, epoch: int) -> Processes:
        # The last one is for all that follow.
        planned = self._plan[min(self.attempts, len(self._plan) - 1)]
        self.attempts += 1
        if isinstance(planned, Exception):
            raise planned
        address = f"unix:{self._directory}/{config.worker_id}-{epoch}.sock"
        processes = Processes(address, epoch, planned, self._status)
        await processes.serve()
        self.started.append(processes)
        return processes

    def close(self) -> None:
        self.closed = True


class Listener:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.claimed: list[Claim] = []

    def claims(self, holdings: Mapping[int, int]) -> Sequence[Claim]:
        self.told.put_nowait(("holds", holdings))
        return self.claimed

    def worker_ready(self, slot: WorkerSlot, kept: Mapping[int, int]) -> None:
        self.told.put_nowait(("ready", slot.epoch, kept) if kept else ("ready", slot.epoch))

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool) -> None:
        self.told.put_nowait(("lost", epoch))

    def worker_suspected(self, slot: WorkerSlot) -> None:
        self.told.put_nowait(("suspect" if slot.suspect else "heard", slot.epoch))

    def worker_answered(self, slot: WorkerSlot, events: Iterable[Event], pages_available: int) -> None:
        for event in events:
            self.told.put_nowait(("answered", slot.epoch, event.op_id))


class Bench:
    """A supervisor of one worker that waits between two starts in `naps_s` only."""

    def __init__(
        self, launcher: FakeLauncher, patch: pytest.MonkeyPatch, config: Config | None = None
    ) -> None:
        self.launcher = launcher
        self.listener = Listener()
        self.naps_s: list[float] = []
        self.supervisor = Supervisor(config or Config(), MODEL, launcher, self.listener)
        instant = SimpleNamespace(**(vars(asyncio) | {"sleep": self._nap}))
        patch.setattr(supervisor_module, "asyncio", instant)

    async def _nap(self, seconds: float) -> None:
        self.naps_s.append(seconds)

    async def told(self, count: int) -> list[tuple[object, ...]]:
        return [await self.listener.told.get() for _ in range(count)]


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_refused_configuration_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the stream's end is seen before the process's."""
    launcher = FakeLauncher(tmp_path, gives_up, status=EXIT_CONFIG)
    with pytest.raises(PoolFailed, match="refused its configuration"):
        await Bench(launcher, monkeypatch).supervisor.run()
    assert launcher.attempts == 1 and launcher.closed
    assert launcher.started[0].grace_s == 15.0, "it gets time to end by itself, and say why"


async def test_what_never_starts_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeLauncher(tmp_path, gives_up, status=1), monkeypatch)
    with pytest.raises(PoolFailed, match="failed to start 5 times"):
        await bench.supervisor.run()
    assert bench.launcher.attempts == 5
    assert bench.naps_s == [0.0, 0.25, 0.5, 1.0, 2.0]


async def test_what_cannot_be_started_now_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EMFILE, "too many open files")
    bench = Bench(FakeLauncher(tmp_path, *[error] * 3, works), monkeypatch)
    with structlog.testing.capture_logs() as logs:
        running = asyncio.create_task(bench.supervisor.run())
        assert await bench.told(1) == [("ready", 4)]
    failed = [record["file"] for record in logs if record["event"] == "worker cannot be started"]
    assert failed == [sys.executable] * 3
    assert bench.naps_s == [0.0, 0.25, 0.5, 1.0]
    await stop(running)


async def test_a_slot_says_why_nobody_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = OSError(errno.EMFILE, "too many open files")
    bench = Bench(FakeLauncher(tmp_path, works, error, loads), monkeypatch)
    (slot,) = bench.supervisor.slots
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(1) == [("ready", 1)] and slot.trouble == ""
    bench.launcher.started[0].exit()
    assert await bench.told(1) == [("lost", 1)] and slot.trouble == "its process ended with status 0"
    while bench.launcher.attempts < 3:
        await asyncio.sleep(0.01)
    assert slot.trouble == "its process cannot be started: too many open files"
    await stop(running)


async def test_a_gateway_that_has_served_does_not_end_because_nothing_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EAGAIN, "resource temporarily unavailable")
    bench = Bench(FakeLauncher(tmp_path, works, *[error] * 12, works), monkeypatch)
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(1) == [("ready", 1)]
    bench.launcher.started[0].exit()
    assert await bench.told(2) == [("lost", 1), ("ready", 14)]
    assert bench.naps_s == [0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, *[10.0] * 6]
    await stop(running)


async def test_where_nothing_can_ever_be_started_the_launcher_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(FakeLauncher(tmp_path, PoolFailed("no such place")), monkeypatch)
    with pytest.raises(PoolFailed, match="no such place"):
        await bench.supervisor.run()
    assert bench.launcher.attempts == 1


async def test_one_that_hangs_is_ended_at_once_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(FakeLauncher(tmp_path, hangs, works), monkeypatch, Config(heartbeat_timeout_s=0.1))
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(3) == [("ready", 1), ("lost", 1), ("ready", 2)]
    assert bench.launcher.started[0].grace_s == 0
    await stop(running)


async def test_one_that_falls_silent_is_suspect_until_it_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = asyncio.Event()

    async def pauses(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
        yield ready()
        await silent.wait()
        async for response in works(requests):
            if not response.events[0].HasField("ready"):
                yield response

    bench = Bench(FakeLauncher(tmp_path, pauses), monkeypatch, Config(suspect_after_s=0.05))
    (slot,) = bench.supervisor.slots
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(2) == [("ready", 1), ("suspect", 1)]
    assert slot.suspect and slot.state == executor_pb2.WORKER_STATE_READY
    silent.set()
    assert await bench.told(1) == [("heard", 1)]
    await stop(running)
    assert not slot.suspect, "nobody is there whom one could suspect"


async def test_one_with_another_model_is_not_admitted_nor_tried_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = serves_another_model
    bench = Bench(FakeLauncher(tmp_path, works, *[other] * 6, works), monkeypatch)
    (slot,) = bench.supervisor.slots
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(1) == [("ready", 1)]
    with structlog.testing.capture_logs() as logs:
        bench.launcher.started[0].exit()
        assert await bench.told(1) == [("lost", 1)]
        while bench.launcher.attempts < 4:
            await asyncio.sleep(0.01)
    assert "holds another model now (two)" in slot.trouble and slot.ready is None
    assert MODEL not in slot.trouble, "clients are told"
    assert any(record.get("model") == MODEL for record in logs)
    assert await bench.told(1) == [("ready", 8)], "of the others nobody is told"
    assert bench.naps_s == [0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    assert slot.trouble == ""
    await stop(running)


async def test_one_that_dies_is_replaced_and_its_epoch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(FakeLauncher(tmp_path, works), monkeypatch)
    supervisor = bench.supervisor
    running = asyncio.create_task(supervisor.run())
    assert await bench.told(1) == [("ready", 1)]
    bench.launcher.started[0].exit()
    assert await bench.told(2) == [("lost", 1), ("ready", 2)]
    (slot,) = supervisor.slots
    assert (slot.epoch, slot.pid, slot.state) == (2, 1002, executor_pb2.WORKER_STATE_READY)
    supervisor.send("worker-0", 1, ReleaseSequences(7, (1,)))
    supervisor.send("worker-0", 2, ReleaseSequences(8, (1,)))
    assert await bench.told(1) == [("answered", 2, 8)], "commands to those before it are dropped"
    await stop(running)
    assert bench.launcher.closed
