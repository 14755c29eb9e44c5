"""Launcher of workers on a Ray cluster. Ray places and starts them, and they dial the gateway.

A child process speaks with Ray (`placement`) and can be lost, with the cluster's head or without: workers
run on, and placements wait until the next child has connected. Restarts are the supervisor's: a worker that
has ended is replaced by another actor. Whether one serves is judged by its stream, not by what Ray says.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from service.config import Config
from service.extensions.ray.settings import RaySettings
from service.logging import get_logger
from service.pool import pool_files
from service.pool.remote import LeasedWorker, RemoteLauncher
from service.pool.worker_port import NamedWorker
from service.settings import ConfigError
from workers.common import child_process, worker_pb2

_log = get_logger(__name__)
_NAME_BYTES = 8
_ALL_HOSTS = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not bound
# Between two child processes.
_BACKOFF_S = 2.0
# By then workers have taken the actors that were left; further ones would keep what others need.
_TAKE_LEFT_S = 5.0
# How long the exit status of a worker may take after its stream has ended.
_STATUS_DELAY_S = 0.5


class RayLauncher(RemoteLauncher):
    """Owner of the child process, and of the placements."""

    def __init__(self, data_dir: Path | None, config: Config, on_locked: Callable[[], None]) -> None:
        """Raises ConfigError."""
        self._settings = config.of(RaySettings)
        if importlib.util.find_spec("ray") is None:
            problem = "needs ray, of the extra ray: `make setup` installs it"
            raise ConfigError("ray_address", "", self._settings.ray_address, problem)
        self._runtime_env = _read_runtime_env(self._settings.ray_runtime_env)
        self._pool = Path(config.pool) if config.pool else pool_files.own_pool(data_dir)
        port = pool_files.worker_port(config.pool_listen, self._pool)
        super().__init__(data_dir, config, on_locked, port)
        self._placements: dict[str, PlacedWorker] = {}
        # Names of actors that an earlier gateway has left.
        self._left: list[str] = []
        self._connected = asyncio.Event()
        # How many workers fit on the nodes, and whether that has changed.
        self._room = 0
        self._room_changed = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> dict[str, LeasedWorker]:
        """Starts the child process. A lease may find a worker with KV. Raises PoolFailed."""
        await super().adopt(configs)
        self._running = asyncio.create_task(self._keep_child(), name="ray-placement")
        return {}

    async def start(self, config: worker_pb2.WorkerConfig) -> LeasedWorker:
        """Takes a worker that an earlier gateway has left, or places one. Waits for resources."""
        await self._connected.wait()
        name = self._left.pop() if self._left else secrets.token_hex(_NAME_BYTES)
        worker = self._placements[name] = PlacedWorker(lambda: self.remove(name))
        self._send("place", name)
        try:
            placed = await worker.placed
            _log.info("ray: worker placed", worker_id=config.worker_id, **placed)
            lease = await self.new_lease(config)
        except BaseException:
            self.remove(name)
            raise
        worker.epoch = lease.epoch
        worker.endpoint = NamedWorker(self._port, name, lease, placed["address"])
        return worker

    async def room(self, known: int) -> int:
        """What else runs on the nodes is not considered."""
        while self._room == known:
            self._room_changed.clear()
            await self._room_changed.wait()
        return self._room

    def remove(self, name: str) -> None:
        """Frees what an actor has taken, and kills its worker if it still runs."""
        if self._placements.pop(name, None) is not None:
            self._send("remove", name)

    def _remove_left(self) -> None:
        while self._left:
            self._send("remove", self._left.pop())

    def close(self) -> None:
        """The child process ends after what it was told."""
        self._running.cancel()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            if not self._connected.is_set() and self._child.returncode is None:
                self._child.kill()
        super().close()

    def _send(self, verb: str, name: str) -> None:
        if self._child is not None and self._child.stdin is not None and self._connected.is_set():
            self._child.stdin.write(f"{verb} {name}\n".encode())

    async def _keep_child(self) -> None:
        environment = {"RAY_USAGE_STATS_ENABLED": "0"} | os.environ
        environment["PYTHONPATH"] = child_process.import_path()
        command = [sys.executable, "-m", "service.extensions.ray.placement", json.dumps(self._options())]
        while True:
            try:
                self._child = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    # Ctrl-C is for the gateway, which this process ends with.
                    start_new_session=True,
                    # Paths in `ray_runtime_env` can be relative.
                    cwd=child_process.current_directory(),
                    env=environment,
                )
            except OSError as error:
                _log.error("the process for Ray cannot be started", error=error.strerror)
                await asyncio.sleep(_BACKOFF_S)
                continue
            assert self._child.stdout is not None
            while line := await self._child.stdout.readline():
                self._on_event(json.loads(line))
            self._connected.clear()
            status = await self._child.wait()
            _log.warning("Ray is out of reach: workers run on, and none is placed", status=status)
            await asyncio.sleep(_BACKOFF_S)

    def _options(self) -> dict[str, Any]:
        config = self._config
        given = (part.split("=") for part in self._settings.ray_resources.split(",") if part)
        resources = {name: float(number) for name, number in given}
        # Ray shows an actor only its own GPUs.
        flags = ["--device-index", "0", "--log-format", "json", "--log-level", config.log_level]
        # A gateway that listens on all of its addresses is dialled at the one that Ray knows.
        host, _, port = config.pool_listen.rpartition(":")
        if config.threads_per_worker is None and (threads := int(resources.get("CPU", 0))):
            flags += ["--threads", str(threads)]
        return {
            "address": self._settings.ray_address,
            "namespace": f"quire-{self._gateway_id}",
            "pool": str(self._pool),
            "gateway": {"host": "" if host in _ALL_HOSTS else host, "port": port},
            "resources": resources,
            "device": config.device,
            "flags": flags,
            "runtime_env": self._runtime_env,
        }

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, name = event.pop("event"), event.get("name", "")
        if kind == "connected":
            _log.info("ray: connected", actors=len(event["actors"]))
            self._connected.set()
            self._left = [name for name in event["actors"] if name not in self._placements]
            asyncio.get_running_loop().call_later(_TAKE_LEFT_S, self._remove_left)
            for name, placement in self._placements.items():
                self._send("watch" if placement.placed.done() else "place", name)
        elif kind == "room":
            self._room = event["workers"]
            self._room_changed.set()
        elif kind in ("joined", "left"):
            _log.info(f"ray: node {kind}", **event)
        elif (known := self._placements.get(name)) is not None:
            known.on_event(kind, event)


def _read_runtime_env(file: str) -> Any:
    """Raises ConfigError."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError):
        raise ConfigError("ray_runtime_env", "", file, "must be a file of JSON") from None


class PlacedWorker(LeasedWorker):
    """An actor and its worker: where that runs, for how long, and how it has ended.

    It has an epoch and an endpoint once it is placed.
    """

    def __init__(self, remove: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[dict[str, Any]] = loop.create_future()
        # After so many seconds the node may be gone.
        self.leaving: asyncio.Future[float] = loop.create_future()
        # The exit status, if the actor has seen it: one of a lost node has not.
        self._ended: asyncio.Future[int | None] = loop.create_future()
        self._remove = remove

    def on_event(self, kind: str, event: dict[str, Any]) -> None:
        if kind == "placed":
            # Or watched again, by the next child process.
            if not self.placed.done():
                self.placed.set_result(event)
            return
        _log.warning(f"ray: actor {kind}", **event)
        if kind == "ended":
            # Or it is said again, to the next child process.
            if not self._ended.done():
                self._ended.set_result(event["status"])
        elif kind == "leaving":
            if not self.leaving.done():
                within_s = event["within_s"]
                self.leaving.set_result(math.inf if within_s is None else within_s)
        elif not self.placed.done():
            self.placed.set_exception(OSError(0, event["why"], f"actor {event['name']}"))

    async def wait(self) -> int | None:
        """Never returns if Ray or the node is lost: its stream ends."""
        return await asyncio.shield(self._ended)

    async def stop(self, *, grace_s: float) -> int | None:
        """It was given back, and ends by itself or is killed."""
        try:
            await asyncio.wait({self._ended}, timeout=min(grace_s, _STATUS_DELAY_S))
        finally:
            self._remove()
        return self._ended.result() if self._ended.done() else None

    def kill(self) -> None:
        self._remove()
