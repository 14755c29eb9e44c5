"""The server under test: gateways that share shards, their workers, and a database, each on its own host."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import asyncpg
import grpc
import psutil

from tests.forks import Forked
from tests.hosts.network import DATABASE, Network, gateway_hosts, worker_hosts
from tests.hosts.server import PORT, children, connect, make_pool, security, start_worker
from tests.postgres_server import PostgresServer
from tests.soak.server import MarkedGateway

_STOP_TIMEOUT_S = 60
_QUERY_TIMEOUT_S = 2.0
# No worker is stopped for good, and a busy machine is slow.
_HANG_TIMEOUT_S = 30.0
_PEER_PORT, _POOL_PORT = 50053, 50052
# How soon a supervisor starts a gateway again.
_RESTART_S = (0.0, 2.0)
# Exit statuses that a fault may lead to: told to end, also while it starts; another one has its home shard;
# an end at a mark.
_EXPECTED = {0, -signal.SIGTERM, 1, 86, -signal.SIGKILL}
_OWNERS = "SELECT shard, address FROM quire.shards WHERE shard >= 0 AND expires_at > clock_timestamp()"


class Gateway(MarkedGateway):
    """One of several, with a host of its own."""

    def __init__(
        self, host: str, namespace: str, address: str, flags: Sequence[str], directory: Path, seed: int
    ) -> None:
        super().__init__(flags, directory, host, seed, namespace)
        self.host = host
        self.address = address
        # When it is to start again, once it has ended.
        self.starts_at_s = 0.0


class Cluster:
    """Owner of all processes. Use as a context manager."""

    def __init__(self, network: Network, directory: Path, options: Any, model: str) -> None:
        self.network = network
        self.rng = random.Random(options.seed)
        self.worker_hosts = worker_hosts(options.workers)
        self._directory = directory
        self._pool = make_pool(directory)
        # Of a caller who may administer it.
        self.token, flags = security(directory, self._pool)
        self.database = PostgresServer(network.address(DATABASE), network.command(DATABASE))
        self._flags = [
            *("--model", model, "--device", "cpu", "--dtype", "float32", "--no-self-check"),
            *("--pool", str(self._pool), "--shards", str(options.shards)),
            *("--workers", str(options.workers)),
            *("--heartbeat-timeout-s", "3", "--kv-pages", str(options.kv_pages), "--orphan-grace-s", "60"),
            *flags,
        ]
        self.gateways: list[Gateway] = []
        self._commands: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._seen_owners: dict[int, Gateway] = {}

    def __enter__(self) -> Self:
        self.database.__enter__()
        ports = ",".join(f"{self.network.address(host)}:{_POOL_PORT}" for host in gateway_hosts(2))
        for host in self.worker_hosts:
            self._commands[host] = start_worker(
                self.network,
                host,
                self._pool,
                self._directory,
                *("--gateway", ports),
                hang_timeout_s=_HANG_TIMEOUT_S,
            )
        for host in gateway_hosts(2):
            address = self.network.address(host)
            flags = [
                *self._flags,
                *("--journal", self.database.url, "--listen", f"{address}:{PORT}"),
                *("--peer-listen", f"{address}:{_PEER_PORT}", "--advertise", f"{address}:{PORT}"),
                *("--pool-listen", f"{address}:{_POOL_PORT}"),
            ]
            namespace, seed = self.network.namespace(host), self.rng.randrange(1 << 31)
            gateway = Gateway(host, namespace, f"{address}:{PORT}", flags, self._directory, seed)
            self.gateways.append(gateway)
            gateway.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._commands.values():
            for child in children(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            process.wait()
        for gateway in self.gateways:
            if gateway.status is None:
                gateway.send_signal(signal.SIGKILL)
                gateway.wait()
        self.database.__exit__()

    @property
    def has_ended(self) -> bool:
        """Whether one of the gateways has."""
        return any(gateway.has_ended for gateway in self.gateways)

    @property
    def ca(self) -> bytes:
        """By which callers know the gateways."""
        return (self._pool / "ca.pem").read_bytes()

    def connect(self, gateway: Gateway, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to one gateway."""
        own = ("grpc.use_local_subchannel_pool", 1)
        return connect(gateway.address, self.ca, self.token, [*options, own])

    async def owners(self) -> dict[int, Gateway]:
        """The gateway that has each shard; as seen last if the database does not answer."""
        by_address = {gateway.address: gateway for gateway in self.gateways}
        with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            connection = await asyncpg.connect(self.database.url, timeout=_QUERY_TIMEOUT_S)
            try:
                rows = await connection.fetch(_OWNERS, timeout=_QUERY_TIMEOUT_S)
                self._seen_owners = {shard: by_address[where.partition(" ")[2]] for shard, where in rows}
            finally:
                connection.terminate()
        return self._seen_owners

    def restart_ended(self, rates: dict[str, float]) -> list[str]:
        """Starts gateways that have ended, each after a while. Returns what must not have happened."""
        found = []
        for gateway in self.gateways:
            if (status := gateway.status) is None:
                continue
            if not gateway.starts_at_s:
                gateway.starts_at_s = time.monotonic() + self.rng.uniform(*_RESTART_S)
                if status not in _EXPECTED:
                    found.append(f"{gateway.host} ended with status {status}\n{self.log_tail()}")
            elif time.monotonic() >= gateway.starts_at_s:
                gateway.starts_at_s = 0.0
                gateway.start(rates)
        return found

    def worker_pids(self) -> list[int]:
        """The processes that compute, which `quire worker` starts again and again."""
        return [child.pid for process in self._commands.values() for child in children(process)]

    def stop(self) -> list[str]:
        """Ends everything in order. Returns what has not."""
        for gateway in self.gateways:
            gateway.send_signal(signal.SIGTERM)
        statuses = {gateway.host: gateway.wait() for gateway in self.gateways}
        for process in self._commands.values():
            for child in children(process):
                child.send_signal(signal.SIGCONT)
            process.terminate()
        statuses |= {host: process.wait(_STOP_TIMEOUT_S) for host, process in self._commands.items()}
        return [f"{host} ended with status {status}" for host, status in statuses.items() if status]

    def log_tail(self, size: int = 4000) -> str:
        """The end of what each gateway has logged."""
        return "\n--\n".join(g.log_path.read_text(errors="replace")[-size:] for g in self.gateways)
