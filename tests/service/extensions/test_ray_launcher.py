"""What the gateway tells the process that speaks with Ray, which is played here."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from service.config import Config
from service.extensions.ray import launcher as ray_launcher
from service.extensions.ray.launcher import PlacedWorker, RayLauncher
from service.settings import ConfigError
from workers.common import worker_pb2

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


class Child:
    """What was said to it, and what it says."""

    def __init__(self, launcher: RayLauncher) -> None:
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self._launcher = launcher
        stdin = SimpleNamespace(write=lambda line: self.said.put_nowait(line.decode().strip()))
        launcher._child = cast(Any, SimpleNamespace(stdin=stdin))

    def says(self, event: str, **fields: object) -> None:
        self._launcher._on_event({"event": event} | fields)


def launcher_in(directory: Path, **settings: Any) -> RayLauncher:
    """One whose workers dial as soon as they are placed."""

    async def dialled(*_: object) -> tuple[int, Any]:
        return 1, SimpleNamespace()

    launcher = RayLauncher(directory, Config().with_values({"ray_address": "auto"} | settings), lambda: None)
    vars(launcher)["_lease_named"] = dialled
    return launcher


async def placed(launcher: RayLauncher, child: Child) -> tuple[str, PlacedWorker]:
    """The name of an actor, and its worker."""
    starting = asyncio.create_task(launcher.start(worker_pb2.WorkerConfig()))
    verb, _, name = (await child.said.get()).partition(" ")
    assert verb == "place"
    child.says("placed", name=name, address="host:1", node="node", pid=1)
    worker = await starting
    assert isinstance(worker, PlacedWorker)
    return name, worker


async def test_actors_that_nobody_takes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier gateway, of which fewer are needed now, would keep what other workers need."""
    monkeypatch.setattr(ray_launcher, "_TAKE_LEFT_S", 0.01)
    launcher = launcher_in(tmp_path)
    child = Child(launcher)
    child.says("connected", actors=["one", "other"])
    name, _ = await placed(launcher, child)
    (unused,) = {"one", "other"} - {name}
    assert await child.said.get() == f"remove {unused}"


async def test_the_next_child_watches_what_is_placed(tmp_path: Path) -> None:
    """What it says again changes nothing, and what is new counts."""
    launcher = launcher_in(tmp_path)
    child = Child(launcher)
    child.says("connected", actors=[])
    name, worker = await placed(launcher, child)
    child.says("connected", actors=[name])
    assert await child.said.get() == f"watch {name}"
    child.says("placed", name=name, address="host:1", node="node", pid=1)
    assert not worker.leaving.done()
    child.says("leaving", name=name, within_s=3.0)
    child.says("leaving", name=name, within_s=2.0)
    assert worker.leaving.result() == 3.0
    child.says("ended", name=name, status=7)
    assert await worker.wait() == 7
    child.says("ended", name=name, status=8)
    assert await worker.wait() == 7


async def test_room(tmp_path: Path) -> None:
    launcher = launcher_in(tmp_path)
    child = Child(launcher)
    waiting = asyncio.create_task(launcher.room(0))
    for found in (0, 3):
        child.says("room", workers=found)
    assert await waiting == 3


def test_a_runtime_environment_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="ray_runtime_env"):
        launcher_in(tmp_path, ray_runtime_env=str(file))
