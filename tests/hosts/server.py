"""The server under test: a gateway and workers, each on a host of its own."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.checkout import ROOT, environment, quire_command
from service.auth.tokens import Role, new_token
from tests.forks import Forked
from tests.hosts.network import GATEWAY, Network, worker_hosts
from tests.soak import programs
from tests.soak.server import Server
from workers.common.protocol import GATEWAY_NAME

_STOP_TIMEOUT_S = 60
_HANG_TIMEOUT_S = 3
PORT, _POOL_PORT = 50051, 50052


def make_pool(directory: Path) -> Path:
    """Makes the certificates of a pool."""
    pool = directory / "pool"
    command = quire_command(ROOT, "pool", "init", str(pool))
    subprocess.run(command, check=True, capture_output=True, env=environment(ROOT))
    return pool


def security(directory: Path, pool: Path) -> tuple[str, list[str]]:
    """A token, and the flags of a gateway. From other hosts only callers with one may load adapters."""
    token, line = new_token("soak", [Role.ADMINISTER])
    tokens = directory / "tokens"
    tokens.write_text(f"[tokens]\n{line}\n")
    tokens.chmod(0o600)
    certificate, key = (str(pool / name) for name in ("gateway.pem", "gateway-key.pem"))
    return token, ["--tokens", str(tokens), "--tls-cert", certificate, "--tls-key", key]


def start_worker(
    network: Network, host: str, pool: Path, directory: Path, *flags: str, hang_timeout_s: float
) -> subprocess.Popen[bytes] | Forked:
    """Starts `quire worker` on a host."""
    return programs.start_worker(
        *("--pool", str(pool), "--threads", "1", *flags),
        *("--log-format", "json", "--hang-timeout-s", f"{hang_timeout_s:g}"),
        log=directory / f"{host}.log",
        namespace=network.namespace(host),
    )


def connect(address: str, ca: bytes, token: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """A channel to a gateway that these authorities have certified."""
    credentials = grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(ca), grpc.access_token_call_credentials(token)
    )
    options = [*options, ("grpc.ssl_target_name_override", GATEWAY_NAME)]
    return grpc.aio.secure_channel(address, credentials, options=options)


def children(process: subprocess.Popen[bytes] | Forked) -> list[psutil.Process]:
    """Those of a `quire worker`; none if it has ended."""
    return psutil.Process(process.pid).children() if process.poll() is None else []


class HostsServer(Server):
    """Owner of the gateway's process, and of `quire worker` on each of the other hosts."""

    def __init__(
        self,
        network: Network,
        model: Path,
        directory: Path,
        *,
        workers: int,
        flags: Sequence[str],
        seed: int,
    ) -> None:
        self._hosts = worker_hosts(workers)
        self._network = network
        self._pool = make_pool(directory)
        self._token, secure = security(directory, self._pool)
        pool_address = f"{network.address(GATEWAY)}:{_POOL_PORT}"
        super().__init__(
            model,
            directory,
            workers=workers,
            flags=[*flags, "--pool", str(self._pool), "--pool-listen", pool_address, *secure],
            seed=seed,
            address=f"{network.address(GATEWAY)}:{PORT}",
            namespace=network.namespace(GATEWAY),
        )
        self._commands: dict[str, subprocess.Popen[bytes] | Forked] = {}
        for host in self._hosts:
            dials = ("--gateway", pool_address)
            self._commands[host] = start_worker(
                network, host, self._pool, directory, *dials, hang_timeout_s=_HANG_TIMEOUT_S
            )

    def connect(self, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """See `Server.connect`."""
        return connect(self.address, (self._pool / "ca.pem").read_bytes(), self._token, options)

    def worker_pids(self) -> list[int]:
        """The processes that compute, which `quire worker` starts again and again."""
        return [child.pid for command in self._commands.values() for child in children(command)]

    def stop(self) -> int:
        """Ends everything in an orderly way; returns the gateway's exit status, or a worker's that failed."""
        self.send_signal(signal.SIGTERM)
        status = self.wait()
        # One that was stopped could not end.
        for pid in self.worker_pids():
            self.kill(pid, signal.SIGCONT)
        for command in self._commands.values():
            command.terminate()
        return status or max(command.wait(_STOP_TIMEOUT_S) for command in self._commands.values())

    def log_tail(self, size: int = 4000) -> str:
        """The end of what each host has logged."""
        logs = [self.directory / f"{host}.log" for host in self._hosts]
        tails = [super().log_tail(size), *(log.read_text(errors="replace")[-size:] for log in logs)]
        return "\n--\n".join(tails)
