"""LoadWeights with REPLACE and the real supervisor, where workers die. Workers run in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from quire.v1 import admin_pb2

from service.caches.entries import WorkerView
from service.caches.requests import PreviousCaches
from service.config import Config
from service.pool.rolling_restart import RollingRestart
from service.runtimes.loading import WeightsLoader
from service.runtimes.sources import ModelSources
from tests.service.test_supervisor import Bench, FakeLauncher, Requests, ready, running
from workers.common import worker_pb2


class Readers:
    """Workers that read other weights. The second one that is connected is slow."""

    def __init__(self) -> None:
        self.started = 0
        self.second_may_go_on = asyncio.Event()
        self.applied: list[int] = []

    async def __call__(self, requests: Requests) -> AsyncIterator[worker_pb2.ConnectResponse]:
        self.started += 1
        me = self.started
        yield ready("one")
        async for request in requests:
            for command in request.commands:
                if command.replace_weights.HasField("apply"):
                    self.applied.append(me)
                if not command.replace_weights.HasField("read"):
                    continue
                if me == 2:
                    await self.second_may_go_on.wait()
                event = worker_pb2.WorkerEvent(op_id=command.op_id)
                event.weights_read.model.fingerprint = "two"
                yield worker_pb2.ConnectResponse(events=[event], pages_available=8)


class Dispatcher:
    """Records what it is told."""

    def __init__(self) -> None:
        self.caches = SimpleNamespace(weights=SimpleNamespace(continued_from=0))
        self.replaced: list[tuple[str, int]] = []
        self.lost: list[tuple[str, int]] = []

    def weights_replaced(
        self, _weights: int, workers: Sequence[WorkerView], previous: PreviousCaches
    ) -> None:
        assert previous is PreviousCaches.RECOMPUTE
        self.replaced = [(worker.worker_id, worker.epoch) for worker in workers]

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool) -> None:
        assert not crashed
        self.lost.append((worker_id, epoch))


async def test_a_worker_restarted_meanwhile_does_not_pass_for_one_with_the_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read them, died, and has loaded the previous ones again when the slower worker has read them."""
    readers, dispatcher = Readers(), Dispatcher()
    bench = Bench(FakeLauncher(readers), monkeypatch, Config(workers=2))
    restarts = RollingRestart(bench.supervisor)
    sources = ModelSources(None, lambda _: None)
    loader = WeightsLoader(bench.supervisor, cast(Any, dispatcher), restarts, sources, Config())
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").touch()

    async def replace() -> list[admin_pb2.LoadWeightsPhase]:
        return [update.phase async for update in loader.replace(str(source), PreviousCaches.RECOMPUTE)]

    async with running(bench):
        assert sorted(await bench.events(2)) == [("ready", 1), ("ready", 2)]
        replacing = asyncio.create_task(replace())
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
        readers.second_may_go_on.set()
        assert (await replacing)[-1] == admin_pb2.LOAD_WEIGHTS_PHASE_SERVING
        assert dispatcher.replaced == [(lives.slot.worker_id, lives.epoch)]
        assert dispatcher.lost == [(dies.slot.worker_id, 3)]
        while readers.started < 4:
            await asyncio.sleep(0)
        assert readers.applied == [2]
