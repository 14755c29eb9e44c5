"""What gateways and workers on hosts of their own are started with, and how they are reached."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import psutil

from benchmarks.checkout import ROOT, environment, quire_command
from service.auth.tokens import Role, new_token
from tests.forks import Forked
from tests.hosts.network import Network
from tests.soak import programs
from workers.common.protocol import GATEWAY_NAME

PORT = 50051


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
        *("--hang-timeout-s", f"{hang_timeout_s:g}"),
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
