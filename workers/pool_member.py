"""Entry point of a worker that no gateway has started: `python -m workers.pool_member`.

Run by `quire worker`. It listens on an address, or calls a gateway. The first gateway with a lease determines
the configuration, and has the worker until the process ends: given back, or `orphan_grace_s` after its stream
broke. So a process never mixes what two gateways know about sequences and adapters. Gateway and worker
authenticate each other by certificates of the pool's CA.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import uvloop
from quire.v1 import worker_pb2, worker_pb2_grpc

from workers import models
from workers.common.addresses import why_not_listening
from workers.common.child_process import open_standard_files
from workers.common.handshakes import HandshakeLimits, Handshakes, Peer, peer_named
from workers.common.protocol import DIRECT, EXIT_CONFIG, GATEWAY_NAME, PROTOCOL, without
from workers.common.switching import switch_often
from workers.common.trusted import require_trusted
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
from workers.server import WorkerServer, Write

SHIPPED_MODEL = "adder"
_LEASE_TIMEOUT_S = 30.0
_CALL_BACKOFF_S = 1.0
_ALIVE_INTERVAL_S = 0.5
# The configuration, with the limits of messages, is not known when the port is opened.
_MAX_MESSAGE_BYTES = (1 << 31) - 1
_LIMITS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
]
# Anyone can connect and never finish the handshake: file descriptors have to be left for files.
_CONNECTIONS = [
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.so_reuseport", 0),
]
# Those on which no gateway has called yet.
_HANDSHAKES = HandshakeLimits(most=64, most_of_address=32, timeout_s=10.0)
_HANDSHAKE_INTERVAL_S = 0.25
# A worker that waits for a lease sends and gets nothing else.
_KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # The gateway may be away for long. The timeout of an attempt is the same as the gateway's.
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 3000),
]
# Fields of a lease's configuration that the host of the worker decides, or that do not affect results.
_OF_THE_HOST = ("device_index", "workers", "log_level", "log_format", "model_was_proved", "worker_id")

_log = get_logger("workers")


class Refused(Exception):
    """A lease is refused. The message is for the operator of the gateway."""


class PoolMember(worker_pb2_grpc.WorkerServiceServicer):
    """Owner of the worker, which exists from the first lease on. `done` has the exit status."""

    def __init__(self, overrides: worker_pb2.WorkerConfig, model: str = "") -> None:
        """`overrides`: fields of the configuration that this host decides.

        model: the directory of the model on this host, if it does not have the gateway's.
        """
        self._overrides = overrides
        self._model = model
        self._lease: worker_pb2.Lease | None = None
        self._worker: WorkerServer | None = None
        self._running: asyncio.Task[None] | None = None
        self.calling: asyncio.Task[None] | None = None
        self.saying: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        # The clients whose calls last, with a certificate of the pool.
        self.peers: set[Peer | None] = set()
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def Connect(  # type: ignore[override]  # the style of grpc.aio that calls context.write
        self,
        request_iterator: AsyncIterator[worker_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> None:
        """Serves a gateway that has called this worker."""
        peer = peer_named(context.peer())
        self.peers.add(peer)
        try:
            await self._connect(request_iterator, context)
        finally:
            self.peers.discard(peer)

    async def _connect(
        self,
        request_iterator: AsyncIterator[worker_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[worker_pb2.ConnectRequest, worker_pb2.ConnectResponse],
    ) -> None:
        names = context.auth_context().get("x509_subject_alternative_name", ())
        if GATEWAY_NAME.encode() not in names:
            _log.warning("a call without a gateway's certificate was refused", peer=context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the certificate is not a gateway's")
        try:
            async with asyncio.timeout(_LEASE_TIMEOUT_S):
                first = await anext(aiter(request_iterator))
            worker = self._take(first.lease)
        except Refused as why:
            _log.warning("a lease was refused", why=str(why), peer=context.peer())
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(why))
        except (StopAsyncIteration, TimeoutError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no lease has arrived")
        await _serve_lease(worker, first.lease, request_iterator, context.write)

    async def call(self, gateway: str, credentials: grpc.ChannelCredentials) -> None:
        """Calls a gateway again and again, until the worker ends."""
        options = [DIRECT, ("grpc.ssl_target_name_override", GATEWAY_NAME), *_LIMITS, *_KEEPALIVE]
        async with grpc.aio.secure_channel(gateway, credentials, options=options) as channel:
            stub = worker_pb2_grpc.WorkerPoolServiceStub(channel)
            while not self.done.done():
                stream = stub.Attach(wait_for_ready=True)
                try:
                    requests = aiter(stream)
                    first = await anext(requests)
                    worker = self._take(first.lease)
                    await _serve_lease(worker, first.lease, requests, stream.write)
                except Refused as why:
                    _log.warning("a lease was refused", why=str(why), gateway=gateway)
                except StopAsyncIteration:
                    pass
                except grpc.aio.AioRpcError as error:
                    _log.warning("the gateway has ended the call", code=error.code().name, gateway=gateway)
                except Exception:
                    _log.exception("a lease cannot be used", gateway=gateway)
                stream.cancel()
                await asyncio.sleep(_CALL_BACKOFF_S)

    def _take(self, lease: worker_pb2.Lease) -> WorkerServer:
        """The worker for a lease, which starts with the first one. Raises Refused."""
        if lease.protocol != PROTOCOL:
            raise Refused("the gateway and the worker are of different versions")
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


async def _serve_lease(
    worker: WorkerServer,
    lease: worker_pb2.Lease,
    requests: AsyncIterator[worker_pb2.ConnectRequest],
    write: Write,
) -> None:
    await worker.serve_stream(
        requests, write, silence_timeout_s=lease.silence_timeout_s, broken=grpc.RpcError
    )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m workers.pool_member", description=__doc__)
    parser.add_argument("--pool", required=True, type=Path)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen")
    where.add_argument("--gateway")
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
    member = PoolMember(_overrides(options), options.model)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _end, member.done)
    if options.alive_fd is not None:
        member.saying = asyncio.create_task(_say_alive(options.alive_fd))
    try:
        names = ("ca.pem", "worker-key.pem", "worker.pem")
        for name in names:
            require_trusted(options.pool / name)
        ca, key, certificate = ((options.pool / name).read_bytes() for name in names)
    except OSError as error:
        _log.error("the pool's certificates cannot be read", error=error.strerror, file=error.filename)
        return EXIT_CONFIG
    if options.gateway:
        to_gateway = grpc.ssl_channel_credentials(ca, key, certificate)
        # Kept until the process ends.
        member.calling = asyncio.create_task(member.call(options.gateway, to_gateway))
    else:
        server = grpc.aio.server(options=[*_LIMITS, *_CONNECTIONS])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(member, server)
        credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
        try:
            port = server.add_secure_port(options.listen, credentials)
        except RuntimeError:
            why_not = why_not_listening(options.listen)
            _log.error("cannot listen", listen=options.listen, error=why_not)
            return EXIT_CONFIG
        await server.start()
        handshakes = Handshakes(port, lambda peer, _: peer in member.peers, _HANDSHAKES, is_final=False)
        member.watching = asyncio.create_task(handshakes.run(_HANDSHAKE_INTERVAL_S))
        host = options.listen.rpartition(":")[0]
        _log.info("waiting for a gateway", listen=f"{host}:{port}")
    return await member.done


async def _say_alive(descriptor: int) -> None:
    """Tells `quire worker`, again and again, that the event loop runs."""
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
