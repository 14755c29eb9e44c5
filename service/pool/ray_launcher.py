"""Launcher of workers on a Ray cluster. Ray places and starts them, the gateway calls their addresses.

A child process speaks with Ray (`ray_placement`) and can be lost, with the cluster's head or without: workers
run on, and placements wait until the next child has connected. Restarts are the supervisor's: a worker that
has ended is replaced by another actor. Whether one serves is judged by its stream, not by what Ray says.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.v1 import worker_pb2

from service.config import Config, ConfigError
from service.logging import get_logger
from service.pool import pool_files
from service.pool.endpoints import LeasedEndpoint, Options, Stream
from service.pool.remote import LeasedWorker, RemoteLauncher

_log = get_logger(__name__)
_NAME_BYTES = 8
# Between two child processes: at first, and at most.
_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 10.0
# A worker listens before it is called.
_CONNECT_TIMEOUT_S = 10.0
# How long the exit status of a worker may take after its stream has ended.
_STATUS_DELAY_S = 0.5
_MAX_LINE_BYTES = 1 << 20


class RayLauncher(RemoteLauncher):
    """Owner of the child process, and of the placements."""

    def __init__(self, data_dir: Path | None, config: Config, on_locked: Callable[[], None]) -> None:
        """See `RemoteLauncher`. Raises ConfigError."""
        if importlib.util.find_spec("ray") is None:
            problem = "needs ray, of the extra ray: pip install 'quire-llm-server[ray]'"
            raise ConfigError("launcher", "a setting", config.launcher, problem)
        if not config.pool and data_dir is None:
            raise ConfigError("launcher", "a setting", config.launcher, "needs pool, or data_dir to make one")
        try:
            self._pool = (
                Path(config.pool) if data_dir is None or config.pool else pool_files.own_pool(data_dir)
            )
        except OSError as error:
            raise ConfigError("data_dir", "a setting", str(data_dir), f"{error.strerror}") from None
        super().__init__(data_dir, config, on_locked, self._pool)
        self._placements: dict[str, _Placement] = {}
        # Names of actors that an earlier gateway has left.
        self._left: list[str] = []
        self._connected = asyncio.Event()
        self._child: asyncio.subprocess.Process | None = None

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> dict[str, LeasedWorker]:
        """Starts the child process. As at addresses, a lease may find a worker with KV."""
        await super().adopt(configs)
        self._running = asyncio.create_task(self._keep_child(), name="ray-placement")
        return {}

    async def start(self, config: worker_pb2.WorkerConfig) -> LeasedWorker:
        """Leases a worker that an earlier gateway has left, or places one. Waits for resources."""
        await self._connected.wait()
        name = self._left.pop() if self._left else secrets.token_hex(_NAME_BYTES)
        placement = self._placements[name] = _Placement()
        self._send("place", name)
        try:
            placed = await placement.placed
            _log.info("ray: worker placed", worker_id=config.worker_id, **placed)
            epoch, endpoint = await self._lease_at(placed["address"], config)
        except BaseException:
            self.remove(name)
            raise
        return PlacedWorker(epoch, _PlacedEndpoint(endpoint), placement, lambda: self.remove(name))

    def remove(self, name: str) -> None:
        """Frees what an actor has taken, and kills its worker if it still runs."""
        if self._placements.pop(name, None) is not None:
            self._send("remove", name)

    def close(self) -> None:
        """See `RemoteLauncher.close`. The child process ends after what it was told."""
        self._running.cancel()
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
        super().close()

    def _send(self, verb: str, name: str) -> None:
        if self._child is not None and self._child.stdin is not None and self._child.returncode is None:
            self._child.stdin.write(json.dumps({verb: name}).encode() + b"\n")

    async def _keep_child(self) -> None:
        backoff_s = _BACKOFF_S
        while True:
            self._connected.clear()
            try:
                await self._run_child()
                if self._connected.is_set():
                    backoff_s = _BACKOFF_S
            except (OSError, ValueError) as error:
                _log.error("the process that speaks with Ray cannot be used", error=str(error))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _run_child(self) -> None:
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.pool.ray_placement", *self._arguments()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # Ctrl-C is for the gateway, which this process ends with.
            start_new_session=True,
            env={"RAY_USAGE_STATS_ENABLED": "0"} | os.environ | {"PYTHONPATH": path},
        )
        assert self._child.stdout is not None
        while line := await self._child.stdout.readline():
            self._on_event(json.loads(line))
        status = await self._child.wait()
        _log.warning("Ray is out of reach: workers run on, and none is placed", status=status)

    def _arguments(self) -> list[str]:
        config = self._config
        found = ["--address", config.ray_address, "--namespace", f"quire-{self._gateway_id}"]
        found += ["--pool", str(self._pool), "--resources", config.ray_resources, "--device", config.device]
        found += ["--grace-s", str(config.orphan_grace_s), "--"]
        # Ray shows an actor only its own GPUs.
        found += ["--device-index", "0", "--log-format", "json", "--log-level", config.log_level]
        taken = dict(part.split("=") for part in config.ray_resources.split(",") if part)
        if config.threads_per_worker is None and (threads := int(float(taken.get("CPU", 0)))):
            found += ["--threads", str(threads)]
        return found

    def _on_event(self, event: dict[str, Any]) -> None:
        kind, name = event.pop("event"), event.get("name", "")
        placement = self._placements.get(name)
        if kind == "connected":
            self._on_connected(event["actors"])
        elif kind == "failed":
            _log.error("ray: failed", **event)
        elif kind in ("joined", "left"):
            _log.info(f"ray: node {kind}", **event)
        elif placement is not None and kind == "placed":
            _resolve(placement.placed, event)
        elif placement is not None:
            _log.warning(f"ray: actor {kind}", **event)
            if kind == "ended":
                _resolve(placement.ended, event["status"])
            if not placement.placed.done():
                why = OSError(0, event.get("why", "it has ended"), f"actor {name}")
                placement.placed.set_exception(why)

    def _on_connected(self, actors: Sequence[str]) -> None:
        _log.info("ray: connected", actors=len(actors))
        self._left = [name for name in actors if name not in self._placements]
        for name, placement in self._placements.items():
            self._send("watch" if placement.placed.done() else "place", name)
        self._connected.set()


class _Placement:
    """What is known of an actor: where its worker runs and listens, and the status that it has ended with."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.placed: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.ended: asyncio.Future[int | None] = loop.create_future()


class PlacedWorker(LeasedWorker):
    """A worker that Ray has started. See `WorkerProcesses`."""

    def __init__(
        self, epoch: int, endpoint: _PlacedEndpoint, placement: _Placement, remove: Callable[[], None]
    ) -> None:
        super().__init__(epoch, endpoint)
        self._placement = placement
        self._remove = remove

    async def wait(self) -> int | None:
        """Returns only if its actor saw it end: that of a lost node does not."""
        return await asyncio.shield(self._placement.ended)

    async def stop(self, *, grace_s: float) -> int | None:
        """It was given back, and ends by itself or is killed."""
        ended = self._placement.ended
        try:
            await asyncio.wait({ended}, timeout=min(grace_s, _STATUS_DELAY_S))
        finally:
            self._remove()
        return ended.result() if ended.done() else None

    def kill(self) -> None:
        """See `WorkerProcesses.kill`."""
        self._remove()


class _PlacedEndpoint:
    """See `LeasedEndpoint`. The node may be lost before the worker is called."""

    is_leased = True

    def __init__(self, endpoint: LeasedEndpoint) -> None:
        self.address = endpoint.address
        self._endpoint = endpoint

    async def open(self, options: Options) -> Stream:
        """See `Endpoint.open`. Raises InvalidStateError if there is no connection in time."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await self._endpoint.open(options)
        except TimeoutError:
            raise asyncio.InvalidStateError from None

    async def close(self) -> None:
        """See `Endpoint.close`."""
        await self._endpoint.close()


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
