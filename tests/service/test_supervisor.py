"""The supervisor starts, watches and replaces workers. Here they run in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
from quire.v1 import executor_pb2, types_pb2

from service.caches.answers import Event
from service.caches.effects import Claim
from service.caches.entries import WorkerView
from service.config import Config
from service.dispatcher import Dispatcher
from service.journal.values import StoredValues
from service.pool import supervisor as supervisor_module
from service.pool.launcher import PoolFailed, WorkerProcesses
from service.pool.link import Stream
from service.pool.model_versions import ModelVersions
from service.pool.supervisor import Supervisor
from service.server import _report_failure
from workers.common import worker_pb2
from workers.common.protocol import EXIT_CONFIG

Requests = AsyncIterator[worker_pb2.ConnectRequest]
Behaviour = Callable[[Requests], AsyncIterator[worker_pb2.ConnectResponse]]


def ready(fingerprint: str = "one") -> worker_pb2.ConnectResponse:
    message = worker_pb2.WorkerReady(
        pages_total=8,
        executor=types_pb2.ExecutorCapabilities(page_size_tokens=16, device="cpu"),
        model=types_pb2.ModelDescription(fingerprint=fingerprint),
    )
    return worker_pb2.ConnectResponse(events=[worker_pb2.WorkerEvent(ready=message)], pages_available=8)


async def works(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Becomes ready and answers all commands."""
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
    """Becomes ready, then hangs."""
    yield ready()
    await asyncio.get_running_loop().create_future()


async def serves_another_model(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Becomes ready with another model: the files were replaced."""
    yield ready("two")
    async for _ in requests:
        yield worker_pb2.ConnectResponse()


async def closes_its_stream(_requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Closes its stream before it is ready."""
    never: list[worker_pb2.ConnectResponse] = []
    for response in never:
        yield response


async def refuses_its_model(_requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
    """Says why, as a worker does that cannot load its model."""
    response = worker_pb2.ConnectResponse()
    response.events.add().error.detail = "config.json: model_type: 'bert' is an encoder"
    yield response


class FakeEndpoint:
    """The stream to a worker in this process."""

    host_address = ""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave
        self._requests: asyncio.Queue[worker_pb2.ConnectRequest] = asyncio.Queue()

    async def open(self, max_bytes: int) -> Stream:
        assert max_bytes
        return cast(Stream, self)

    async def write(self, request: worker_pb2.ConnectRequest) -> None:
        self._requests.put_nowait(request)

    async def __aiter__(self) -> AsyncIterator[worker_pb2.ConnectResponse]:
        async for response in self._behave(self._sent()):
            yield response

    async def _sent(self) -> Requests:
        """Until it is given back. A worker ends its stream then, and nobody waits for it."""
        while not (request := await self._requests.get()).give_back:
            yield request

    async def close(self) -> None:
        pass


class Processes:
    """An incarnation, whose process exits when it is stopped or when the test calls `exit`."""

    def __init__(self, epoch: int, behave: Behaviour, status: int | None) -> None:
        self.endpoint = FakeEndpoint(behave)
        self.pid = 1000 + epoch
        self.is_outdated = False
        self.epoch = epoch
        self.grace_s: float | None = None
        self.was_killed = self.was_detached = False
        self._status = status
        self._exit: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def exit(self) -> None:
        if not self._exit.done():
            self._exit.set_result(self._status)

    async def wait(self) -> int | None:
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        self.was_killed = True

    def detach(self) -> None:
        self.was_detached = True

    async def stop(self, *, grace_s: float) -> int | None:
        self.grace_s = grace_s
        self.exit()
        return await self._exit


MODEL = "/where/models/are"


class FakeLauncher:
    """Starts incarnations with the planned behaviours, or raises the planned errors."""

    def __init__(self, *plan: Behaviour | Exception, status: int | None = 0) -> None:
        self.started: list[Processes] = []
        # What each attempt was to start.
        self.configs: list[worker_pb2.WorkerConfig] = []
        # Workers of an earlier gateway.
        self.adoptable: dict[str, WorkerProcesses] = {}
        self.last_epoch = 0
        self.attempts = 0
        self.closed = False
        self._plan = plan
        self._status = status

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, WorkerProcesses]:
        return self.adoptable

    async def start(self, config: worker_pb2.WorkerConfig) -> Processes:
        # The last one repeats.
        planned = self._plan[min(self.attempts, len(self._plan) - 1)]
        self.configs.append(config)
        self.attempts += 1
        self.last_epoch += 1
        epoch = self.last_epoch
        if isinstance(planned, Exception):
            raise planned
        processes = Processes(epoch, planned, self._status)
        self.started.append(processes)
        return processes

    def close(self) -> None:
        self.closed = True


class FakeDispatcher:
    """Records what the supervisor reports to the dispatcher."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.claimed: list[Claim] = []
        self.drained = asyncio.Event()
        # It stands for the state machine as well.
        self.caches = self

    def claims(self, holdings: Mapping[int, int]) -> Sequence[Claim]:
        self.events.put_nowait(("holds", holdings))
        return self.claimed

    def worker_ready(self, worker: WorkerView, kept: Mapping[int, int]) -> None:
        self.events.put_nowait(("ready", worker.epoch, kept) if kept else ("ready", worker.epoch))

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool) -> None:
        self.events.put_nowait(("lost", epoch))

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        self.events.put_nowait(("suspect" if suspect else "heard", epoch))

    def worker_draining(self, worker_id: str, epoch: int) -> None:
        self.events.put_nowait(("draining", epoch))

    def is_drained(self, worker_id: str, epoch: int) -> bool:
        return self.drained.is_set()

    def worker_answered(
        self, worker_id: str, epoch: int, events: Iterable[Event], pages_available: int
    ) -> None:
        for op_id, _ in events:
            self.events.put_nowait(("answered", epoch, op_id))


class Bench:
    """A supervisor that records its backoff in `sleeps_s` instead of sleeping."""

    def __init__(
        self,
        launcher: FakeLauncher,
        patch: pytest.MonkeyPatch,
        config: Config | None = None,
        values: StoredValues | None = None,
    ) -> None:
        config = config or Config()
        self.launcher = launcher
        self.dispatcher = FakeDispatcher()
        self.sleeps_s: list[float] = []
        self.on_sleep: Callable[[], None] = lambda: None
        self.versions = ModelVersions(MODEL, config.worker_slots, values)
        self.supervisor = Supervisor(config, self.versions, launcher)
        instant = SimpleNamespace(**(vars(asyncio) | {"sleep": self._sleep}))
        patch.setattr(supervisor_module, "asyncio", instant)

    async def run(self) -> None:
        await self.supervisor.run(cast(Dispatcher, self.dispatcher))

    async def _sleep(self, seconds: float) -> None:
        self.sleeps_s.append(seconds)
        self.on_sleep()

    async def events(self, count: int) -> list[tuple[object, ...]]:
        return [await self.dispatcher.events.get() for _ in range(count)]


async def stop(running: asyncio.Task[None]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[None]:
    """Runs the supervisor meanwhile."""
    task = asyncio.create_task(bench.run())
    yield
    await stop(task)


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench_of(monkeypatch: pytest.MonkeyPatch) -> MakeBench:
    """Makes a bench whose workers behave as planned."""

    def make(*plan: Behaviour | Exception, status: int | None = 0, **settings: Any) -> Bench:
        return Bench(FakeLauncher(*plan, status=status), monkeypatch, Config(**settings))

    return make


async def test_refused_configuration_is_not_retried(bench_of: MakeBench) -> None:
    """Also if its stream ends before its process."""
    bench = bench_of(closes_its_stream, status=EXIT_CONFIG)
    with pytest.raises(PoolFailed, match="refused its configuration"):
        await bench.run()
    assert bench.launcher.attempts == 1 and bench.launcher.closed
    assert bench.launcher.started[0].grace_s == 15.0, "it gets time to exit with a status"


async def test_a_refused_model_and_why_are_in_one_line(bench_of: MakeBench) -> None:
    """Of the log, and of what ends the server."""
    bench, said = bench_of(refuses_its_model, status=EXIT_CONFIG), "'bert' is an encoder"
    with structlog.testing.capture_logs() as logs, pytest.raises(PoolFailed, match=said):
        await bench.run()
    (line,) = (line for line in logs if line["event"] == "worker is gone")
    assert line["why"] == f"it refused its configuration: config.json: model_type: {said}"


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (-9, "it was killed by signal 9 (SIGKILL)"),
        (EXIT_CONFIG, "it refused its configuration; its last log line says why"),
        (None, "its process ended"),
    ],
)
async def test_the_log_says_how_a_process_ended(bench_of: MakeBench, status: int | None, why: str) -> None:
    bench = bench_of(works, works, status=status)
    with structlog.testing.capture_logs() as logs:
        async with running(bench):
            await bench.events(1)
            bench.launcher.started[0].exit()
            await bench.events(2)
    assert [line["why"] for line in logs if line["event"] == "worker is gone"] == [why]


async def test_gives_up_if_no_worker_ever_starts(bench_of: MakeBench) -> None:
    bench = bench_of(closes_its_stream, status=1)
    with pytest.raises(PoolFailed, match="failed to start 5 times"):
        await bench.run()
    assert bench.launcher.attempts == 5
    assert bench.sleeps_s == [0.0, 0.25, 0.5, 1.0, 2.0]


async def test_wrong_model_on_one_host_does_not_end_the_pool(bench_of: MakeBench) -> None:
    """Workers of other hosts have directories of their own. The right one is served."""
    bench = bench_of(serves_another_model, works, pool_listen="here:50060", pool="here")
    bench.versions.expected_fingerprint = "one"
    async with running(bench):
        assert await bench.events(1) == [("ready", 2)]


async def test_silent_worker_is_suspect_until_its_next_message(bench_of: MakeBench) -> None:
    silent = asyncio.Event()

    async def pauses(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
        yield ready()
        await silent.wait()
        async for response in works(requests):
            if not response.events[0].HasField("ready"):
                yield response

    bench = bench_of(pauses, suspect_after_s=0.05)
    (slot,) = bench.versions.slots
    async with running(bench):
        assert await bench.events(2) == [("ready", 1), ("suspect", 1)]
        assert slot.suspect and slot.state == executor_pb2.WORKER_STATE_READY
        silent.set()
        assert await bench.events(1) == [("heard", 1)]
    assert not slot.suspect, "there is no worker any more"


async def test_a_worker_that_dies_while_it_is_asked_fails_nobody(bench_of: MakeBench) -> None:
    """A refresh returns the other workers, and what was known of this one."""
    bench = bench_of(hangs)
    async with running(bench):
        assert await bench.events(1) == [("ready", 1)]
        refresh = asyncio.create_task(bench.supervisor.refresh_snapshots(check_integrity=True))
        await asyncio.sleep(0)
        bench.launcher.started[0].exit()
        assert await refresh == bench.versions.slots


async def _fails(error: BaseException) -> None:
    raise error


async def test_errors_are_told_one_by_one_however_deep_they_lie_in_groups() -> None:
    deep = ExceptionGroup("inner", [PoolFailed("it never starts"), ExceptionGroup("", [OSError("other")])])
    workers = asyncio.create_task(_fails(ExceptionGroup("outer", [deep])))
    await asyncio.wait({workers})
    with structlog.testing.capture_logs() as logs:
        assert _report_failure(workers) == 1
    said = [(record["event"], record.get("error")) for record in logs]
    assert said == [("cannot start workers", "it never starts"), ("the worker pool failed", None)]
