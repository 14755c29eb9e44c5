"""Launcher of workers that somebody else starts, on this or other hosts. They dial this gateway.

A lease has the epoch and the configuration. A worker with the KV of an earlier lease of this gateway keeps
it: see `Incarnation`. Whether a worker is alive is judged by its messages alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from service.config import Config
from service.lease import FencedLease
from service.listening import CannotListen
from service.logging import get_logger
from service.pool.launcher import PoolFailed
from service.pool.link import Endpoint
from service.pool.worker_directory import Epochs, WorkerDirectory
from service.pool.worker_port import DialledWorker, WorkerPort
from workers.common import worker_pb2

_log = get_logger(__name__)
# How long a gateway that follows another one waits for that one's workers, before it takes new ones.
_FIND_OWN_S = 1.0
_ID_BYTES = 16


class LeasedWorker:
    """A worker that was leased, while this gateway has it. See `WorkerProcesses`."""

    # A pid of another host means nothing here.
    pid = 0
    # The operator of that host restarts it for an upgrade.
    is_outdated = False

    def __init__(self, epoch: int, endpoint: Endpoint) -> None:
        self.epoch = epoch
        self.endpoint = endpoint

    async def wait(self) -> int | None:
        """Never returns: the end of the stream, or silence, is all that can be seen of the process."""
        await asyncio.Event().wait()
        return None

    async def stop(self, *, grace_s: float) -> int | None:  # noqa: ARG002
        """Does nothing: its link has given it back, and it ends by itself."""
        return None

    def kill(self) -> None:
        """Does nothing: without a gateway it ends after `orphan_grace_s`."""

    def detach(self) -> None:
        """Does nothing: it keeps its KV until it is leased again, or for `orphan_grace_s`."""


class RemoteLauncher:
    """Owner of the leases of one shard. Those of all shards share the port."""

    def __init__(
        self, data_dir: Path | None, config: Config, port: WorkerPort, lease: FencedLease | None = None
    ) -> None:
        """Without a `data_dir` or a `lease` the next gateway is another one for the workers."""
        self._config = config
        self._port = port
        self._directory = None if data_dir is None else WorkerDirectory(data_dir)
        self._epochs = Epochs(self._directory)
        self._gateway_id = secrets.token_hex(_ID_BYTES)
        if lease is not None:
            # The shard's: to its workers the next owner is the same gateway, and they keep their KV.
            self._gateway_id = lease.lease_id
            self._epochs.continue_after(lease.first_epoch)
        # Until when the workers of an earlier gateway are preferred, by the clock of the event loop.
        self._finds_own_until_s = 0.0

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, LeasedWorker]:  # noqa: ARG002
        """Opens the directory and the port. No worker is adopted here: a lease may find one with KV.

        Raises PoolFailed.
        """
        if self._directory is not None:
            try:
                last_epoch, self._gateway_id = self._directory.begin()
                self._epochs.continue_after(last_epoch)
            except (OSError, ValueError) as error:
                _log.warning("workers will not know the next gateway of this data_dir", error=str(error))
        try:
            self._port.join(self._gateway_id)
        except CannotListen as error:
            raise PoolFailed(f"cannot listen on pool_listen = {error}") from None
        if self._epochs.last:
            self._finds_own_until_s = asyncio.get_running_loop().time() + _FIND_OWN_S
        return {}

    async def start(self, config: worker_pb2.WorkerConfig) -> LeasedWorker:
        """Leases the worker that has waited longest. Waits for one that takes the lease."""
        # Its share in the cores of its host, of which this one knows nothing, and what was proved here.
        config.workers, config.model_was_proved = 1, False
        lease = worker_pb2.Lease(
            gateway_id=self._gateway_id, silence_timeout_s=self._config.heartbeat_timeout_s, config=config
        )
        while True:
            worker = await self._take()
            try:
                # Only now: others may have been leased meanwhile.
                lease.epoch = await self._epochs.next()
            except BaseException:
                worker.stream.close()
                raise
            if await self._port.lease(worker, lease):
                return LeasedWorker(lease.epoch, worker)

    async def _take(self) -> DialledWorker:
        try:
            async with asyncio.timeout_at(self._finds_own_until_s):
                return await self._port.take(lambda hello: hello.gateway_id == self._gateway_id)
        except TimeoutError:
            ours = "", self._gateway_id
            return await self._port.take(lambda hello: not hello.name and hello.gateway_id in ours)

    def close(self) -> None:
        """Streams are closed already."""
        if self._directory is not None:
            self._directory.close()
        self._port.leave(self._gateway_id)
