"""A worker: dials a gateway, again and again, and waits for a lease.

The first lease determines the configuration. Its gateway has the worker until the process ends, because it
was given back or because `orphan_grace_s` have passed since its stream broke. So a process never mixes what
two gateways know about sequences and adapters. If a gateway is restarted, it gives the next lease, and the KV
is kept.

A gateway starts workers on its own machine, which dial its Unix socket. `quire worker` starts others, which
dial a port, where both sides authenticate each other by certificates of the pool's CA.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import signal
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from google.protobuf.message import DecodeError

from workers import models
from workers.common import worker_pb2
from workers.common.addresses import UNIX, short_path
from workers.common.message_stream import MessageStream, MessageTooLong
from workers.common.pool_tls import tls_context
from workers.common.protocol import EXIT_CONFIG, GATEWAY_NAME, HOP_SLACK_BYTES, PROTOCOL, without
from workers.common.switching import switch_often
from workers.logging import get_logger
from workers.orphan_timer import OrphanTimer
from workers.process import EXIT_FAILED, Parent, configure_logging, make_worker, run_worker
from workers.server import WorkerServer

SHIPPED_MODELS = ("adder", "storyteller")
# For connecting to another host, with the handshake.
_CONNECT_TIMEOUT_S = 5.0
# How long it waits for a lease before it dials again: so neither side stays connected to one that is gone,
# and other gateways that need a worker are tried.
_WAIT_S = 5.0
# The pause between two rounds over all gateways without a lease: at first, at most, and at most on this
# machine.
_BACKOFF_S, _MAX_BACKOFF_S, _MAX_LOCAL_BACKOFF_S = 0.02, 0.5, 0.1
_ALIVE_INTERVAL_S = 0.5
# A lease has nothing large.
_MAX_LEASE_BYTES = 1 << 16
_BROKEN = TimeoutError, OSError, StopAsyncIteration, MessageTooLong, DecodeError
# Fields of a lease's configuration that the worker's host decides, or that do not affect results.
_OF_THE_HOST = ("device_index", "workers", "log_level", "log_format", "model_was_proved", "worker_id")

_log = get_logger("workers")


class Refused(Exception):
    """A lease is refused. The message is for the operator."""


class PoolMember:
    """Owner of the worker, which exists from the first lease on. `done` has the exit status."""

    def __init__(
        self,
        overrides: worker_pb2.WorkerConfig,
        model: str = "",
        name: str = "",
        parent: Parent | None = None,
    ) -> None:
        """`overrides`: fields of the configuration that this host decides.

        model: the directory of the model on this host, if it is not the same as on the gateway's.
        name: the name by which its launcher knows it.
        parent: the gateway that started it, which it outlives if it has an `orphan_grace_s`. None: another
            process started it.
        """
        self._overrides = overrides
        self._model = model
        self._name = name
        self._parent = parent
        self._lease: worker_pb2.Lease | None = None
        self._worker: WorkerServer | None = None
        self._running: asyncio.Task[None] | None = None
        # What was last logged about each gateway, so that the log does not repeat it.
        self._said: dict[str, str] = {}
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def dial(self, gateways: Sequence[str], tls: ssl.SSLContext | None) -> None:
        """Dials the gateways in turn, until the worker ends. A name may have several addresses.

        tls: None for a Unix socket.

        The gateway that had it last is tried last: its host may be lost, which takes seconds to notice. The
        others refuse the worker at once, unless they have taken over the shard.
        """
        backoff_s, last = _BACKOFF_S, ""
        most_s = _MAX_BACKOFF_S if tls else _MAX_LOCAL_BACKOFF_S
        while not self._is_ending:
            addresses = [address for gateway in gateways for address in await self._addresses(gateway)]
            for address in sorted(dict.fromkeys(addresses), key=lambda address: address == last):
                if await self._visit(address, tls):
                    backoff_s, last = _BACKOFF_S, address
                    break
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, most_s)

    @property
    def _is_ending(self) -> bool:
        return self.done.done() or (self._worker is not None and self._worker.ended.done())

    async def _addresses(self, gateway: str) -> list[str]:
        if gateway.startswith(UNIX):
            return [gateway]
        host, _, port = gateway.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            # UnicodeError: this cannot be the name of a host.
            self._say(gateway, getattr(error, "strerror", None) or "there is no such host")
            return []
        hosts = [str(place[0]) for *_, place in found]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    async def _visit(self, gateway: str, tls: ssl.SSLContext | None) -> bool:
        """Dials a gateway, and serves it if it gives a lease. Returns False if it does not."""
        stream = MessageStream(worker_pb2.ConnectRequest, _MAX_LEASE_BYTES)
        why = "it does not answer"
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await _connect(stream, gateway, tls)
                await stream.write(worker_pb2.ConnectResponse(hello=self._hello()))
            why = "it needs no worker for now"
            async with asyncio.timeout(_WAIT_S):
                first = await anext(stream)
            if not first.HasField("lease"):
                raise Refused(first.refusal)
            worker = self._take(first.lease)
            await stream.write(worker_pb2.ConnectResponse())
            self._said.clear()
            stream.max_bytes = first.lease.config.max_request_bytes + HOP_SLACK_BYTES
            await worker.serve_stream(stream, stream.write, silence_timeout_s=first.lease.silence_timeout_s)
            return True
        except Refused as refusal:
            why = str(refusal)
        except TimeoutError:
            pass
        except _BROKEN as error:
            why = getattr(error, "strerror", None) or "it has closed the connection"
        except Exception:
            # A bug. The process is started again by its parent.
            _log.exception("a lease cannot be used", gateway=gateway)
            _end(self.done, EXIT_FAILED)
        finally:
            stream.close()
        self._say(gateway, why)
        return False

    def _hello(self) -> worker_pb2.Hello:
        hello = worker_pb2.Hello(protocol=PROTOCOL, name=self._name)
        if (lease := self._lease) is not None:
            hello.gateway_id, hello.epoch, hello.secret = lease.gateway_id, lease.epoch, lease.secret
        return hello

    def _say(self, gateway: str, why: str) -> None:
        """Logs why a gateway gives no lease, unless that was just logged."""
        if self._said.get(gateway) != why:
            self._said[gateway] = why
            _log.warning("no lease", gateway=gateway, why=why)

    def _take(self, lease: worker_pb2.Lease) -> WorkerServer:
        """The worker for a lease, which starts with the first one. Raises Refused."""
        lease.config.MergeFrom(self._overrides)
        if self._worker is None or self._lease is None:
            self._start(lease)
        elif lease.gateway_id != self._lease.gateway_id:
            raise Refused("another gateway has this worker")
        elif lease.epoch < self._lease.epoch:
            raise Refused("a later stream of this gateway has this worker")
        elif without(lease.config, _OF_THE_HOST) != without(self._lease.config, _OF_THE_HOST):
            self._worker.end()
            raise Refused("the configuration has changed: the worker starts again")
        self._lease = lease
        assert self._worker is not None
        return self._worker

    def _start(self, lease: worker_pb2.Lease) -> None:
        # Does not change the lease: later ones are compared with it.
        config = worker_pb2.WorkerConfig()
        config.CopyFrom(lease.config)
        if config.model in SHIPPED_MODELS:
            config.model = str(Path(models.__file__).parent / config.model)
        elif self._model and not Path(config.model).is_dir():
            config.model = self._model
        configure_logging(config)
        orphan_timer = OrphanTimer(config.orphan_grace_s) if config.orphan_grace_s else None
        if orphan_timer is not None and self._parent is not None:
            self._parent.outlive()
        self._worker = make_worker(config, orphan_timer)
        self._running = asyncio.create_task(self._run(self._worker, orphan_timer))

    async def _run(self, worker: WorkerServer, orphan_timer: OrphanTimer | None) -> None:
        status = await run_worker(worker, orphan_timer)
        if status == EXIT_CONFIG and self._parent is None:
            # The gateway decides the configuration: that of the next lease may be another one.
            status = EXIT_FAILED
        _end(self.done, status)


async def _connect(
    stream: MessageStream[worker_pb2.ConnectRequest], gateway: str, tls: ssl.SSLContext | None
) -> None:
    """Raises OSError."""
    if tls is None:
        with short_path(gateway.removeprefix(UNIX)) as path:
            await asyncio.get_running_loop().create_unix_connection(lambda: stream, path)
        return
    host, _, port = gateway.rpartition(":")
    await asyncio.get_running_loop().create_connection(
        lambda: stream, host.strip("[]"), int(port), ssl=tls, server_hostname=GATEWAY_NAME
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    parser.add_argument("--gateway", required=True, type=lambda text: text.split(","))
    parser.add_argument("--pool", type=Path, help="the certificates; without them a gateway has started it")
    parser.add_argument("--name", default="")
    parser.add_argument("--lock", type=Path, help="a file by which the next gateway finds this process")
    for name, kind in OVERRIDES.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind)
    parser.add_argument("--model", default="")
    parser.add_argument("--alive-fd", type=int)
    parser.add_argument("--log-format", default="auto")
    parser.add_argument("--log-level", default="info")
    return parser.parse_args()


# Fields of WorkerConfig that `quire worker` has as flags, and their types.
OVERRIDES: dict[str, Callable[[str], Any]] = {
    "device": str,
    "device_index": int,
    "threads": int,
    "kv_pages": int,
}


def _overrides(options: argparse.Namespace) -> worker_pb2.WorkerConfig:
    given = {name: value for name in OVERRIDES if (value := getattr(options, name)) is not None}
    return worker_pb2.WorkerConfig(**given, log_format=options.log_format, log_level=options.log_level)


async def _serve(options: argparse.Namespace, parent: Parent) -> int:
    is_local = options.pool is None
    member = PoolMember(_overrides(options), options.model, options.name, parent if is_local else None)
    try:
        if options.lock is not None:
            _lock(options.lock)
        tls = None if is_local else tls_context(options.pool, "worker", is_server=False)
    except OSError as error:
        _log.error("a file cannot be used", error=error.strerror, file=error.filename)
        return EXIT_FAILED if is_local else EXIT_CONFIG
    if not is_local:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end, member.done, 0)
        _log.info("dialling", gateways=",".join(options.gateway))
    # Kept until the process ends.
    dialling = asyncio.create_task(member.dial(options.gateway, tls))
    _alive = None if options.alive_fd is None else asyncio.create_task(_say_alive(options.alive_fd))
    await asyncio.wait((dialling, member.done), return_when=asyncio.FIRST_COMPLETED)
    if dialling.done() and (bug := dialling.exception()) is not None:
        # The process is started again by its parent.
        _log.error("dialling failed", exc_info=bug)
        return EXIT_FAILED
    return await member.done


def _lock(path: Path) -> None:
    """Locks a file until this process ends. The kernel tells others which process has it. Raises OSError."""
    # It must stay open, and must not be opened again: closing it once would unlock it.
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def _say_alive(descriptor: int) -> None:
    """Tells the launcher periodically that it has its certificates and that its event loop runs."""
    while True:
        os.write(descriptor, b".")
        await asyncio.sleep(_ALIVE_INTERVAL_S)


def _end(done: asyncio.Future[int], status: int) -> None:
    if not done.done():
        done.set_result(status)


def main() -> int:
    """Runs until the worker ends. Returns the exit status."""
    options = _parse_arguments()
    configure_logging(worker_pb2.WorkerConfig(log_format=options.log_format, log_level=options.log_level))
    switch_often()
    parent = Parent()
    # Ctrl-C and a service manager's SIGTERM reach all processes, but a gateway drains before it ends its own
    # workers. So may SIGUSR2, which ends a gateway and leaves its workers.
    for number in (signal.SIGINT, *(() if options.pool else (signal.SIGTERM, signal.SIGUSR2))):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    return uvloop.new_event_loop().run_until_complete(_serve(options, parent))
