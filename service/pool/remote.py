"""Launcher of workers that somebody else starts, on this or other hosts. It leases them instead.

They listen at the addresses of `workers_at`, or call this gateway at `pool_listen`, which takes any that is
free. A lease has the epoch and the configuration. A worker with the KV of an earlier lease of this gateway
keeps it: see `Incarnation`. Whether a worker is alive is judged by its messages alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import grpc
from quire.v1 import worker_pb2, worker_pb2_grpc

from service.config import Config
from service.lease import FencedLease
from service.listening import CannotListen, binding
from service.logging import get_logger
from service.pool import pool_files
from service.pool.endpoints import AttachedEndpoint, Endpoint, LeasedEndpoint
from service.pool.launcher import PoolFailed
from service.pool.registry import Epochs, Registry
from service.pool.threads import in_thread
from workers.common.handshakes import HandshakeLimits, Handshakes, Peer, peer_named
from workers.common.protocol import HOP_SLACK_BYTES, PROTOCOL, WORKER_NAME

_log = get_logger(__name__)
# Workers that wait without need; further ones are refused, and call again.
_MAX_WAITING = 64
# Connections beside those of the workers in use: between two looks at those of which no worker is known yet.
_MAX_FURTHER_CONNECTIONS = 512
_HANDSHAKE_TIMEOUT_MS = 10_000
# Of these. Anyone can open some and never finish the handshake.
_HANDSHAKES = HandshakeLimits(most=64, most_of_address=32, timeout_s=_HANDSHAKE_TIMEOUT_MS / 1e3)
_HANDSHAKE_INTERVAL_S = 0.25
_CLOSE_GRACE_S = 0.5
_ID_BYTES = 16
_Context = grpc.aio.ServicerContext[worker_pb2.ConnectResponse, worker_pb2.ConnectRequest]


class LeasedWorker:
    """A worker of another host, while this gateway has it. See `WorkerProcesses`."""

    # That of the other host means nothing here.
    pid = 0
    # Whoever runs it there restarts it for an upgrade.
    is_outdated = False
    leaving: asyncio.Future[float] | None = None

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
        """Does nothing: it keeps its KV until its stream is opened again, or for `orphan_grace_s`."""


class RemoteLauncher:
    """Owner of the leases, and of the port that workers call."""

    def __init__(
        self,
        data_dir: Path | None,
        config: Config,
        on_locked: Callable[[], None],
        pool: Path,
        lease: FencedLease | None = None,
    ) -> None:
        """Without a `data_dir` or a `lease` the next gateway is another one for the workers.

        Raises ConfigError.

        on_locked: called on a thread when the data directory is this gateway's. pool: see `pool_files`.
        """
        self._on_locked = on_locked
        self._config = config
        self._addresses = config.worker_addresses
        self._registry = None if data_dir is None else Registry(data_dir)
        self._epochs = Epochs(self._registry)
        self._gateway_id = secrets.token_hex(_ID_BYTES)
        if lease is not None:
            # Of the shard: its next owner is the same one for its workers, and they keep their KV.
            self._gateway_id = lease.lease_id
            self._epochs.continue_after(lease.first_epoch)
        self._credentials = pool_files.channel_credentials(pool)
        self._waiting = WaitingWorkers()
        self._server_credentials = pool_files.server_credentials(pool)
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, LeasedWorker]:  # noqa: ARG002
        """Opens the registry and the port. No worker is adopted here: a lease may find one with KV."""
        if self._registry is not None:
            try:
                await self._registry.wait_open()
                await in_thread(self._on_locked)
                self._epochs.continue_after(self._registry.last_epoch())
                self._gateway_id = self._registry.gateway_id()
            except (OSError, ValueError) as error:
                _log.warning("workers will not know the next gateway of this data_dir", error=str(error))
        if self._config.pool_listen:
            await self._listen()
        return {}

    async def _listen(self) -> None:
        """Raises PoolFailed."""
        most = self._config.worker_slots + _MAX_FURTHER_CONNECTIONS
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", self._config.max_response_bytes + HOP_SLACK_BYTES),
                ("grpc.max_send_message_length", self._config.max_request_bytes + HOP_SLACK_BYTES),
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_TIMEOUT_MS),
                # Workers find out by pings whether the gateway is there while they wait.
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                # And the gateway whether they are, so that it does not lease one that is gone.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.ping_timeout_ms", 5_000),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.so_reuseport", 0),
            ]
        )
        worker_pb2_grpc.add_WorkerPoolServiceServicer_to_server(self._waiting, self._server)
        try:
            with binding(self._config.pool_listen):
                port = self._server.add_secure_port(self._config.pool_listen, self._server_credentials)
        except CannotListen as error:
            raise PoolFailed(f"cannot listen on pool_listen = {error}") from None
        await self._server.start()
        handshakes = Handshakes(
            port, lambda peer, _: self._waiting.peers[peer] > 0, _HANDSHAKES, is_final=False
        )
        self._watching = asyncio.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S), name="handshakes")
        _log.info("workers can call", pool_listen=self._config.pool_listen)

    async def start(self, config: worker_pb2.WorkerConfig) -> LeasedWorker:
        """Leases a worker: the one at the slot's address, or the next that calls. Waits for the latter."""
        if self._addresses:
            return LeasedWorker(*await self._lease_at(self._addresses[config.device_index], config))
        attached = await self._waiting.take()
        attached.lease = await self._new_lease(config)
        return LeasedWorker(attached.lease.epoch, attached)

    async def _lease_at(self, address: str, config: worker_pb2.WorkerConfig) -> tuple[int, LeasedEndpoint]:
        """The epoch of a lease of the worker at an address, and how its stream is opened."""
        lease = await self._new_lease(config)
        return lease.epoch, LeasedEndpoint(address, self._credentials, lease)

    async def _new_lease(self, config: worker_pb2.WorkerConfig) -> worker_pb2.Lease:
        return worker_pb2.Lease(
            gateway_id=self._gateway_id,
            epoch=await self._epochs.next(),
            silence_timeout_s=self._config.heartbeat_timeout_s,
            config=config,
            protocol=PROTOCOL,
        )

    def close(self) -> None:
        """Streams are closed already."""
        if self._registry is not None:
            self._registry.close()
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            # Stopping it takes a moment in which nothing depends on it.
            self._closing = asyncio.ensure_future(self._server.stop(_CLOSE_GRACE_S))


class WaitingWorkers(worker_pb2_grpc.WorkerPoolServiceServicer):
    """Workers that have called and are not leased yet, in the order of their calls."""

    def __init__(self) -> None:
        self._waiting: deque[AttachedEndpoint] = deque()
        self._arrived = asyncio.Event()
        # The clients whose calls last, with a certificate of the pool, and how many do: a connection's next
        # call may begin before the end of the last one is noticed.
        self.peers: Counter[Peer | None] = Counter()

    async def take(self) -> AttachedEndpoint:
        """The one that has waited longest. Waits for one."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    async def Attach(  # type: ignore[override]  # the style of grpc.aio that calls context.write
        self, request_iterator: AsyncIterator[worker_pb2.ConnectResponse], context: _Context
    ) -> None:
        """Lasts until the stream is closed by either side."""
        peer = peer_named(context.peer())
        self.peers[peer] += 1
        try:
            await self._attach(request_iterator, context)
        finally:
            self.peers -= Counter((peer,))

    async def _attach(
        self, request_iterator: AsyncIterator[worker_pb2.ConnectResponse], context: _Context
    ) -> None:
        if WORKER_NAME not in pool_files.names_of(context):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate is not a worker's")
        if len(self._waiting) >= _MAX_WAITING:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many workers wait already")
        worker = AttachedEndpoint(request_iterator, context)
        _log.info("a worker has called", address=worker.host_address)
        self._waiting.append(worker)
        self._arrived.set()
        try:
            await worker.ended.wait()
        finally:
            worker.ended.set()
            if worker in self._waiting:
                self._waiting.remove(worker)
