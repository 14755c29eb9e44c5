"""Weights are loaded beside those that serve, by the real supervisor; workers run in this process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire.v1 import executor_pb2, runner_pb2

from service.api.server_state import ServerState
from service.config import Config
from service.errors import InvalidArgument, LoadFailed, Loading, NoMemory, NoWorker
from service.pool.rotation import Rotation
from service.pool.served import Served, ServedFile
from service.runtimes import sources
from service.runtimes.loading import WeightsLoader
from service.runtimes.sources import Sources
from tests.service.test_supervisor import (
    MODEL,
    Behaviour,
    Bench,
    FakeLauncher,
    gives_up,
    loads,
    serves_another_model,
    stop,
    works,
)
from tests.sim.harness import Gateway

PHASES = runner_pb2.LoadWeightsPhase


class Loads(Bench):
    """A supervisor whose first worker serves; those after it do as planned. And a loader for it."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch, *plan: Behaviour | Exception) -> None:
        super().__init__(FakeLauncher(tmp_path, works, *plan), patch, Config(worker_start_timeout_s=0.3))
        self.gateway = Gateway(workers=0)
        self.file = ServedFile(tmp_path / "data")
        self.rotation = Rotation(self.supervisor, self.gateway.dispatcher)
        self.state = ServerState(Config(drain_grace_s=0.0))
        self.loader = WeightsLoader(
            self.supervisor,
            self.gateway.dispatcher,
            self.state,
            self.rotation,
            Sources(tmp_path, None),
            self.file,
            MODEL,
            lambda _: None,
        )
        self.source = tmp_path / "model"
        self.source.mkdir()
        (self.source / "config.json").touch()

    async def load(self, drain_s: float = 0.0) -> list[PHASES]:
        return [said.phase async for said in self.loader.load(str(self.source), drain_s)]

    def is_as_before(self) -> bool:
        """The first worker serves, and no other is there."""
        (slot,) = self.supervisor.all_slots
        serves = slot.epoch == 1 and slot.state == executor_pb2.WORKER_STATE_READY
        return serves and self.gateway.dispatcher.weights == 0 and self.file.read() is None


@contextlib.asynccontextmanager
async def serving(bench: Loads) -> AsyncIterator[None]:
    running = asyncio.create_task(bench.supervisor.run())
    assert await bench.told(1) == [("ready", 1)]
    bench.state.worker_became_ready(bench.supervisor.slots[0].ready)  # type: ignore[arg-type]
    yield
    await stop(running)


async def test_they_serve_when_all_workers_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Loads(tmp_path, monkeypatch, serves_another_model)
    async with serving(bench):
        bench.state.worker_became_ready(bench.supervisor.slots[0].ready, 1)  # type: ignore[arg-type]
        assert (await bench.load())[-1] == PHASES.LOAD_WEIGHTS_PHASE_SERVING
        assert bench.file.read() == Served(MODEL, str(bench.source), 1)
        (slot,) = bench.supervisor.all_slots
        assert (slot.worker_id, slot.epoch) == ("worker-0.1", 2) and bench.launcher.started[0].grace_s
        # Who dies from now on is replaced, as ever.
        bench.launcher.started[1].exit()
        while slot.epoch != 3 or slot.ready is None:
            await asyncio.sleep(0)


@pytest.mark.parametrize("behave", [gives_up, loads, OSError(errno.EAGAIN, "no more processes")])
async def test_one_that_does_not_come_to_serve_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behave: Behaviour | Exception
) -> None:
    """It is tried once."""
    bench = Loads(tmp_path, monkeypatch, behave, works)
    async with serving(bench):
        with pytest.raises(LoadFailed):
            await bench.load()
        assert bench.is_as_before() and bench.launcher.attempts == 2
        # And again: with another name, and another number.
        bench.state.worker_became_ready(bench.supervisor.slots[0].ready, 2)  # type: ignore[arg-type]
        await bench.load()
        assert bench.gateway.dispatcher.weights == 2


async def test_a_switch_that_cannot_be_written_down_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Loads(tmp_path, monkeypatch, works)
    (tmp_path / "data").touch()
    async with serving(bench):
        with pytest.raises(LoadFailed, match="written down"):
            await bench.load()
        assert bench.is_as_before()


async def test_whoever_goes_takes_it_back_until_it_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Loads(tmp_path, monkeypatch, loads, works)
    async with serving(bench):
        loading = asyncio.create_task(bench.load())
        while len(bench.launcher.started) < 2:
            await asyncio.sleep(0)
        with pytest.raises(Loading):
            await bench.load()
        loading.cancel()
        await asyncio.wait({loading})
        assert loading.cancelled() and bench.is_as_before()
        assert bench.launcher.started[1].grace_s == 0.0

        writing, written = asyncio.Event(), asyncio.Event()

        async def write_down(_: Served) -> None:
            writing.set()
            await written.wait()

        monkeypatch.setattr(bench.loader, "_write_down", write_down)
        loading = asyncio.create_task(bench.load())
        await writing.wait()
        loading.cancel()
        written.set()
        await asyncio.wait({loading})
        assert loading.cancelled() and bench.gateway.dispatcher.weights == 2
        while len(bench.supervisor.all_slots) > 1:
            await asyncio.sleep(0)


async def test_what_does_not_fit_or_is_not_there_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Loads(tmp_path, monkeypatch, works)
    (bench.source / "model.safetensors").write_bytes(bytes(1000))
    psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=999))
    monkeypatch.setattr(sources, "psutil", psutil)
    async with serving(bench):
        ready = bench.supervisor.slots[0].ready
        assert ready is not None
        ready.executor.device = "cpu"
        with pytest.raises(NoMemory):
            await bench.load()
        for source in ("", "no\0path", str(tmp_path), "/" * 5000):
            with pytest.raises(InvalidArgument, match="the source is neither"):
                _ = [said async for said in bench.loader.load(source, 0.0)]
        assert bench.is_as_before() and bench.launcher.attempts == 1


class Hub:
    """Downloads a model until it is told that nobody wants it."""

    def __init__(self) -> None:
        self.begun, self.ended, self.goes_on = threading.Event(), threading.Event(), threading.Event()
        self.was_told = False

    def find(self, _hub_id: str, on_progress: Callable[[float], None]) -> Path:
        self.begun.set()
        try:
            assert self.goes_on.wait(60)
            for _ in range(500):
                on_progress(0.5)
                time.sleep(0.01)
        except LoadFailed:
            self.was_told = True
            raise
        finally:
            self.ended.set()
        return Path("/nowhere")


async def test_a_download_that_nobody_waits_for_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, hub = Loads(tmp_path, monkeypatch, works), Hub()
    bench.loader._sources = Sources(tmp_path, hub.find)
    async with serving(bench):

        async def load() -> None:
            async for _ in bench.loader.load("org/name", 0.0):
                pass

        downloading = asyncio.create_task(load())
        await asyncio.to_thread(hub.begun.wait)
        downloading.cancel()
        await asyncio.wait({downloading})
        with pytest.raises(Loading):
            await bench.load()
        hub.goes_on.set()
        await asyncio.to_thread(hub.ended.wait)
        while bench.loader._sources.is_busy:
            await asyncio.sleep(0)
        bench.state.worker_became_ready(bench.supervisor.slots[0].ready, 1)  # type: ignore[arg-type]
        assert (await bench.load())[-1] == PHASES.LOAD_WEIGHTS_PHASE_SERVING


def test_a_server_that_stops_ends_a_download(tmp_path: Path) -> None:
    hub = Hub()
    hub.goes_on.set()

    async def serve() -> asyncio.Task[str]:
        finding = asyncio.create_task(Sources(tmp_path, hub.find).find("org/name"))
        await asyncio.to_thread(hub.begun.wait)
        return finding

    with asyncio.Runner() as runner:
        finding = runner.run(serve())
    assert finding.cancelled() and hub.was_told


async def test_it_is_told_that_they_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short that was."""
    bench = Loads(tmp_path, monkeypatch, works)
    async with serving(bench):
        bench.state.worker_became_ready(bench.supervisor.slots[0].ready, 1)  # type: ignore[arg-type]
        phases = await bench.load()
    assert list(dict.fromkeys(phases)) == [
        PHASES.LOAD_WEIGHTS_PHASE_LOADING,
        PHASES.LOAD_WEIGHTS_PHASE_CHECKING,
        PHASES.LOAD_WEIGHTS_PHASE_DRAINING,
        PHASES.LOAD_WEIGHTS_PHASE_SERVING,
    ]


def test_what_cannot_be_written_whole_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a descriptor for the directory: it is said that nothing has changed, so nothing has."""
    file = ServedFile(tmp_path)
    file.write(Served("a", "a", 1))
    opens = os.open

    def full(path: Any, flags: int, *rest: Any) -> int:
        if Path(path) == tmp_path:
            raise OSError(errno.EMFILE, "too many open files")
        return opens(path, flags, *rest)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match="too many"):
        file.write(Served("a", "b", 2))
    assert file.read() == Served("a", "a", 1)


async def test_a_replacement_and_a_switch_do_not_get_in_each_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was to be replaced has gone, or does not come back: nobody waits for ever."""
    bench = Loads(tmp_path, monkeypatch, works, loads)
    async with serving(bench):
        bench.state.worker_became_ready(bench.supervisor.slots[0].ready, 1)  # type: ignore[arg-type]
        async with bench.rotation.paused():
            renewing = asyncio.create_task(bench.rotation.renew(0.0))
            replacing = asyncio.create_task(bench.rotation.replace("worker-0", 0.0))
            loading = asyncio.create_task(bench.load())
            while len(bench.supervisor.all_slots) < 2 or not bench.supervisor.all_slots[1].ready:
                await asyncio.sleep(0)
        # They were first. The worker that is ended for them has no successor.
        ended = await asyncio.gather(renewing, replacing, return_exceptions=True)
        assert [type(error) for error in ended] == [NoWorker, NoWorker]
        assert (await loading)[-1] == PHASES.LOAD_WEIGHTS_PHASE_SERVING


async def test_a_worker_is_replaced_though_the_caller_went_while_it_was_draining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be ready, and take no work, until somebody replaces it."""
    bench = Loads(tmp_path, monkeypatch, works)
    draining = asyncio.Event()
    monkeypatch.setattr(bench.gateway.dispatcher, "worker_draining", lambda *_: draining.set())
    monkeypatch.setattr(bench.gateway.dispatcher, "is_drained", lambda *_: False)
    async with serving(bench):
        replacing = asyncio.create_task(bench.rotation.replace("", grace_s=600.0))
        await draining.wait()
        replacing.cancel()
        await asyncio.wait({replacing})
        (slot,) = bench.supervisor.slots
        while slot.epoch == 1 or slot.ready is None:
            await asyncio.sleep(0)
        assert replacing.cancelled() and len(bench.launcher.started) == 2
