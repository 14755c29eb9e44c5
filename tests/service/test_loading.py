"""LoadWeights with the real supervisor: what is refused, cancelled or fails. Workers run in this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2, executor_pb2

from service.caches.entries import WorkerView
from service.caches.requests import PreviousCaches
from service.config import Config
from service.errors import InvalidArgument, LoadFailed, NoMemory, StorageUnavailable
from service.journal.values import StoredValues
from service.pool.rolling_restart import RollingRestart
from service.runtimes import loading as loading_module
from service.runtimes.loading import WeightsLoader
from tests.service.test_supervisor import (
    MODEL,
    Behaviour,
    Bench,
    FakeLauncher,
    Requests,
    ready,
    running,
    serves_another_model,
    stop,
    works,
)
from tests.sim.harness import FailingJournal, Gateway
from workers.common import worker_pb2

PHASES = admin_pb2.LoadWeightsPhase


class Reader:
    """Workers that read other weights when they are told to. The second one can be slow."""

    def __init__(self) -> None:
        self.second_may_read = asyncio.Event()
        self.second_may_read.set()
        # Why they cannot use what they have read.
        self.refusal = ""
        self.started = self.discarded = 0
        # Which of them have put it into place.
        self.applied: list[int] = []

    async def __call__(self, requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
        self.started += 1
        number = self.started
        yield ready("one")
        async for request in requests:
            for command in request.commands:
                self.discarded += command.replace_weights.HasField("discard")
                if command.replace_weights.HasField("apply"):
                    self.applied.append(number)
                if not command.replace_weights.HasField("read"):
                    continue
                if number == 2:
                    await self.second_may_read.wait()
                event = worker_pb2.WorkerEvent(op_id=command.op_id)
                if self.refusal:
                    event.error.detail = self.refusal
                else:
                    event.weights_read.model.fingerprint = "two"
                yield worker_pb2.ConnectResponse(events=[event], pages_available=8)


class Loads(Bench):
    """A supervisor with a loader. The first worker reads weights; later ones behave as planned."""

    def __init__(
        self, tmp_path: Path, patch: pytest.MonkeyPatch, *plan: Behaviour | Exception, workers: int = 1
    ) -> None:
        self.journal = FailingJournal()
        self.values = StoredValues(self.journal)
        self.reader = Reader()
        config = Config(worker_start_timeout_s=60.0, drain_grace_s=0.0, workers=workers)
        super().__init__(FakeLauncher(self.reader, *plan), patch, config, self.values)
        self.gateway = Gateway(workers=0)
        self.restarts = RollingRestart(self.supervisor)
        dispatcher = self.gateway.dispatcher
        self.loader = WeightsLoader(self.supervisor, dispatcher, self.restarts, lambda _: None, config)
        self.source = tmp_path / "model"
        self.source.mkdir()
        (self.source / "config.json").touch()

    async def load(self, previous: PreviousCaches = PreviousCaches.END) -> list[PHASES]:
        return [update.phase async for update in self.loader.replace(str(self.source), previous)]

    def stored(self) -> dict[str, Any]:
        """What the next gateway serves."""
        return cast("dict[str, Any]", json.loads(self.values.get("weights")))

    def is_unchanged(self) -> bool:
        """Whether the first worker serves and is the only one."""
        (slot,) = self.versions.slots
        serves = slot.epoch == 1 and slot.state == executor_pb2.WORKER_STATE_READY
        return serves and self.gateway.machine.weights.serving == 0 and self.stored()["model"] == MODEL


MakeLoads = Callable[..., Loads]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeLoads:
    """Makes a bench whose later workers behave as planned."""
    return functools.partial(Loads, tmp_path, monkeypatch)


@contextlib.asynccontextmanager
async def serving(bench: Loads) -> AsyncIterator[None]:
    running = asyncio.create_task(bench.run())
    assert await bench.events(1) == [("ready", 1)]
    yield
    await stop(running)


@pytest.mark.parametrize("why", ["the model differs", ""])
async def test_weights_that_a_worker_refuses_are_not_served(make: MakeLoads, why: str) -> None:
    bench = make()
    async with serving(bench):
        bench.reader.refusal = why or "the server's log says why"
        with pytest.raises(LoadFailed, match=bench.reader.refusal):
            await bench.load()
        assert bench.is_unchanged()
        bench.reader.refusal = ""
        await bench.load()
        assert bench.gateway.machine.weights.serving == 1


async def test_a_caller_who_does_not_read_the_progress_keeps_no_others_out(make: MakeLoads) -> None:
    bench = make()
    async with serving(bench):
        unread = bench.loader.replace(str(bench.source), PreviousCaches.END)
        assert (await anext(unread)).phase == PHASES.LOAD_WEIGHTS_PHASE_LOADING
        assert (await bench.load())[-1] == PHASES.LOAD_WEIGHTS_PHASE_SERVING
        await unread.aclose()


async def test_a_worker_restarted_meanwhile_does_not_pass_for_one_with_the_new_weights(
    make: MakeLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read them, died, and has loaded the previous ones again when the slower worker has read them."""
    bench = make(workers=2)
    replaced, lost = list[tuple[str, int]](), list[tuple[str, int]]()
    bench.reader.second_may_read.clear()

    def weights_replaced(_weights: int, workers: Sequence[WorkerView], previous: PreviousCaches) -> None:
        assert previous is PreviousCaches.RECOMPUTE
        replaced.extend((worker.worker_id, worker.epoch) for worker in workers)

    dispatcher = bench.gateway.dispatcher
    monkeypatch.setattr(dispatcher, "weights_replaced", weights_replaced)
    monkeypatch.setattr(dispatcher, "worker_lost", lambda *who, **_: lost.append(who))
    async with running(bench):
        assert sorted(await bench.events(2)) == [("ready", 1), ("ready", 2)]
        replacing = asyncio.create_task(bench.load(PreviousCaches.RECOMPUTE))
        while sum(len(each._waiters) for each in bench.supervisor.serving_workers()) < 2:
            await asyncio.sleep(0)
        workers = bench.supervisor.serving_workers()
        while not (has_read := [each for each in workers if not each._waiters]):
            await asyncio.sleep(0)
        (dies,), (lives,) = has_read, [each for each in workers if each not in has_read]
        bench.launcher.started[dies.epoch - 1].exit()
        events = [("lost", dies.epoch), ("ready", 3)]
        while events:
            event = await bench.dispatcher.events.get()
            events = [each for each in events if each != event]
        bench.reader.second_may_read.set()
        assert (await replacing)[-1] == PHASES.LOAD_WEIGHTS_PHASE_SERVING
        assert replaced == [(lives.slot.worker_id, lives.epoch)]
        assert lost == [(dies.slot.worker_id, 3)]
        while bench.reader.started < 4:
            await asyncio.sleep(0)
    assert bench.reader.applied == [2]


async def test_a_worker_that_was_started_before_the_switch_is_not_taken_after_it(make: MakeLoads) -> None:
    """It has loaded the previous weights."""
    may_be_ready = asyncio.Event()

    async def is_slow(requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
        await may_be_ready.wait()
        async for response in serves_another_model(requests):
            yield response

    bench = make(is_slow, serves_another_model)
    async with serving(bench):
        bench.journal.is_slow = True
        loading = asyncio.create_task(bench.load())
        while not bench.journal._waiting:
            await asyncio.sleep(0)
        bench.launcher.started[0].exit()
        while bench.launcher.attempts < 2:
            await asyncio.sleep(0)
        bench.journal.settle()
        await loading
        may_be_ready.set()
        (slot,) = bench.versions.slots
        while slot.ready is None:
            await asyncio.sleep(0)
        assert slot.epoch == 3
        assert [config.model for config in bench.launcher.configs] == [MODEL, MODEL, str(bench.source)]


async def test_switch_that_cannot_be_stored_fails(make: MakeLoads) -> None:
    bench = make()
    async with serving(bench):
        bench.journal.fails = True
        with pytest.raises(StorageUnavailable):
            await bench.load()
        assert bench.is_unchanged()
        while not bench.reader.discarded:
            await asyncio.sleep(0)


async def test_missing_or_too_large_model_is_refused(
    make: MakeLoads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    (bench.source / "model.safetensors").write_bytes(bytes(1000))
    # What affinity and cgroups allow: of the machine more may be free.
    monkeypatch.setattr(loading_module, "available_bytes", lambda: 999)
    async with serving(bench):
        with pytest.raises(NoMemory):
            await bench.load()
        for source in ("", "no\0path", str(tmp_path), "/" * 5000):
            with pytest.raises(InvalidArgument, match="the source is neither"):
                _ = [update async for update in bench.loader.replace(source, PreviousCaches.END)]
        for source in ("ORG/NAME", "ORG/NAME:Q4_K_M"):
            with pytest.raises(InvalidArgument, match="give the directory that `hf download` prints"):
                _ = [update async for update in bench.loader.replace(source, PreviousCaches.END)]
        assert bench.is_unchanged() and bench.launcher.attempts == 1


async def test_a_link_to_nothing_is_refused_by_workers(make: MakeLoads, tmp_path: Path) -> None:
    """They name the file. So it is in a cache of the hub whose download was not completed."""
    bench = make()
    (bench.source / "model.safetensors").symlink_to(tmp_path / "nothing")
    async with serving(bench):
        bench.reader.refusal = "model.safetensors: cannot be read"
        with pytest.raises(LoadFailed, match=bench.reader.refusal):
            await bench.load()


async def test_draining_worker_is_replaced_if_the_caller_cancels(
    make: MakeLoads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would stay ready without taking work."""
    bench = make(works)
    draining = asyncio.Event()
    monkeypatch.setattr(bench.dispatcher, "worker_draining", lambda *_: draining.set())
    async with serving(bench):
        replacing = asyncio.create_task(bench.restarts.replace("", grace_s=600.0))
        await draining.wait()
        replacing.cancel()
        await asyncio.wait({replacing})
        (slot,) = bench.versions.slots
        while slot.epoch == 1 or slot.ready is None:
            await asyncio.sleep(0)
        assert replacing.cancelled() and len(bench.launcher.started) == 2
