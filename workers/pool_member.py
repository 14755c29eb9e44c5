"""Entry point of a worker that no gateway has started: `python -m workers.pool_member`.

Run by `quire worker`. It dials a gateway, again and again, and waits for a lease. The first one determines
the configuration, and its gateway has the worker until the process ends: given back, or `orphan_grace_s`
after its stream broke. So a process never mixes what two gateways know about sequences and adapters. Gateway
and worker authenticate each other by certificates of the pool's CA.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop
from google.protobuf.message import DecodeError
from quire.v1 import worker_pb2

from workers import models
from workers.common.child_process import open_standard_files
from workers.common.message_stream import MessageStream, MessageTooLong
from workers.common.pool_tls import tls_context
from workers.common.protocol import EXIT_CONFIG, GATEWAY_NAME, HOP_SLACK_BYTES, PROTOCOL, without
from workers.common.switching import switch_often
from workers.logging import background_log, get_logger
from workers.orphan_timer import OrphanTimer
from workers.process import (
    EXIT_FAILED,
    STOP_TIMEOUT_S,
    configure_logging,
    end_with_parent,
    make_worker,
    run_worker,
)
from workers.server import WorkerServer

SHIPPED_MODEL = "adder"
# To connect to another host, and its handshake.
_CONNECT_TIMEOUT_S = 5.0
# How long it waits for a lease before it dials again: neither side may be gone unnoticed, and another gateway
# may need a worker.
_WAIT_S = 5.0
# Between two rounds over all gateways without a lease: at first, and at most.
_BACKOFF_S, _MAX_BACKOFF_S = 0.02, 0.5
_ALIVE_INTERVAL_S = 0.5
# A lease has nothing large.
_MAX_LEASE_BYTES = 1 << 16
_BROKEN = TimeoutError, OSError, StopAsyncIteration, MessageTooLong, DecodeError
# Fields of a lease's configuration that the host of the worker decides, or that do not affect results.
_OF_THE_HOST = ("device_index", "workers", "log_level", "log_format", "model_was_proved", "worker_id")

_log = get_logger("workers")


class Refused(Exception):
    """A lease is refused. The message is for the operator."""


class PoolMember:
    """Owner of the worker, which exists from the first lease on. `done` has the exit status."""

    def __init__(self, overrides: worker_pb2.WorkerConfig, model: str = "", name: str = "") -> None:
        """`overrides`: fields of the configuration that this host decides.

        model: the directory of the model on this host, if it does not have the gateway's.
        name: by which the one who has started it knows it.
        """
        self._overrides = overrides
        self._model = model
        self._name = name
        self._lease: worker_pb2.Lease | None = None
        self._worker: WorkerServer | None = None
        self._running: asyncio.Task[None] | None = None
        # What was said of each gateway last, so that the log does not repeat it.
        self._said: dict[str, str] = {}
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def dial(self, gateways: Sequence[str], tls: ssl.SSLContext) -> None:
        """Dials the gateways in turn, until the worker ends. A name may be that of several.

        The one that had it last comes last: its host may be lost, which takes seconds to see. The others send
        the worker away at once, unless they have the shard by now.
        """
        backoff_s, last = _BACKOFF_S, ""
        _log.info("dialling", gateways=",".join(gateways))
        while not self.done.done():
            addresses = [address for gateway in gateways for address in await self._addresses(gateway)]
            for address in sorted(dict.fromkeys(addresses), key=lambda address: address == last):
                if await self._visit(address, tls):
                    backoff_s, last = _BACKOFF_S, address
                    break
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _addresses(self, gateway: str) -> list[str]:
        host, _, port = gateway.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), port, type=socket.SOCK_STREAM
            )
        except (OSError, UnicodeError) as error:
            # UnicodeError: it cannot be the name of a host.
            self._say(gateway, getattr(error, "strerror", None) or "there is no such host")
            return []
        hosts = [str(place[0]) for *_, place in found]
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    async def _visit(self, gateway: str, tls: ssl.SSLContext) -> bool:
        """Dials a gateway, and serves it if it gives a lease. False: it does not."""
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
            _log.exception("a lease cannot be used", gateway=gateway)
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
        """Logs why a gateway gives no lease, and not again and again."""
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
        elif lease.epoch <= self._lease.epoch:
            raise Refused("a later stream of this gateway has this worker")
        elif without(lease.config, _OF_THE_HOST) != without(self._lease.config, _OF_THE_HOST):
            self._worker.end()
            raise Refused("the configuration has changed: the worker starts again")
        self._lease = lease
        assert self._worker is not None
        return self._worker

    def _start(self, lease: worker_pb2.Lease) -> None:
        # The lease stays as it came: later ones are compared with it.
        config = worker_pb2.WorkerConfig()
        config.CopyFrom(lease.config)
        # Of this host, as far as is known.
        config.workers = 1
        # That was on another machine, or before this process.
        config.model_was_proved = False
        if config.model == SHIPPED_MODEL:
            config.model = str(Path(models.__file__).parent / SHIPPED_MODEL)
        elif self._model and not Path(config.model).is_dir():
            config.model = self._model
        configure_logging(config)
        orphan_timer = OrphanTimer(config.orphan_grace_s) if config.orphan_grace_s else None
        self._worker = make_worker(config, orphan_timer)
        self._running = asyncio.create_task(self._run(self._worker, config.model, orphan_timer))

    async def _run(self, worker: WorkerServer, model: str, orphan_timer: OrphanTimer | None) -> None:
        status = await run_worker(worker, model, orphan_timer)
        # The configuration is the gateway's: the next lease may have another one.
        self.done.set_result(EXIT_FAILED if status == EXIT_CONFIG else status)


async def _connect(
    stream: MessageStream[worker_pb2.ConnectRequest], gateway: str, tls: ssl.SSLContext
) -> None:
    """Raises OSError."""
    host, _, port = gateway.rpartition(":")
    await asyncio.get_running_loop().create_connection(
        lambda: stream, host.strip("[]"), int(port), ssl=tls, server_hostname=GATEWAY_NAME
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.pool_member", description=__doc__)
    parser.add_argument("--pool", required=True, type=Path)
    parser.add_argument("--gateway", required=True, type=lambda text: text.split(","))
    parser.add_argument("--name", default="")
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


async def _serve(options: argparse.Namespace) -> int:
    member = PoolMember(_overrides(options), options.model, options.name)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end, member.done)
    try:
        tls = tls_context(options.pool, "worker", is_server=False)
    except OSError as error:
        _log.error("the pool's certificates cannot be read", error=error.strerror, file=error.filename)
        return EXIT_CONFIG
    # Kept until the process ends.
    dialling = asyncio.create_task(member.dial(options.gateway, tls))
    _alive = None if options.alive_fd is None else asyncio.create_task(_say_alive(options.alive_fd))
    await asyncio.wait((dialling, member.done), return_when=asyncio.FIRST_COMPLETED)
    if not member.done.done():
        # A bug. Who has started the process starts it again.
        _log.error("dialling failed", exc_info=dialling.exception())
        return EXIT_FAILED
    return await member.done


async def _say_alive(descriptor: int) -> None:
    """Tells who has started it, again and again, that it has its certificates and its event loop runs."""
    while True:
        os.write(descriptor, b".")
        await asyncio.sleep(_ALIVE_INTERVAL_S)


def _end(done: asyncio.Future[int]) -> None:
    if not done.done():
        done.set_result(0)


def main() -> int:
    """Runs until the worker ends. Returns the exit status."""
    options = _parse_arguments()
    configure_logging(worker_pb2.WorkerConfig(log_format=options.log_format, log_level=options.log_level))
    switch_often()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    return uvloop.new_event_loop().run_until_complete(_serve(options))


if __name__ == "__main__":
    open_standard_files()
    sys.stdout.flush()
    # Not sys.exit: that would wait for a compute thread in a long step.
    status = main()
    background_log().drain(STOP_TIMEOUT_S)
    os._exit(status)
