"""Where workers dial. Each waits there until a launcher takes it and gives it a lease.

Workers of this machine dial a Unix socket in a directory that only this user can enter, others a port with
TLS. Launchers of several shards share a port. A worker with KV belongs to the gateway that it names. A new
one goes to any launcher that needs one, or to the launcher that knows its name. A worker that is not needed
is refused, and dials another gateway. Limits apply to connections before they are identified: on their
number, their duration and the bytes they send.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from service.handshakes import HandshakeLimits, beyond
from service.listening import CannotListen, listening_socket
from service.logging import RareWarnings, get_logger
from workers.common import worker_pb2
from workers.common.addresses import UNIX, short_path
from workers.common.message_stream import MessageStream, MessageTooLong
from workers.common.pool_tls import names_of_peer
from workers.common.protocol import PROTOCOL, WORKER_NAME

_log = get_logger(__name__)
# From the connection to the hello. Anyone can connect to a port and say nothing: the oldest are closed.
_UNKNOWN = HandshakeLimits(most=64, most_of_address=32, timeout_s=10.0)
_MAX_HELLO_BYTES = 1 << 10
# Workers that wait without need; further ones are refused, and dial again. And those that are being told why
# they are refused; further ones are not told.
_MAX_WAITING, _MAX_REFUSED = 64, 64
# A worker dials again before that. One that is still there has lost its network.
_MAX_WAIT_S = 30.0
# How long a worker has to answer a lease, and to close a stream on which it was refused.
_ANSWER_TIMEOUT_S, _FAREWELL_S = 10.0, 2.0
# When no file descriptor is left.
_ACCEPT_PAUSE_S = 0.1
_BROKEN = TimeoutError, OSError, StopAsyncIteration, MessageTooLong, DecodeError

Wants = Callable[[worker_pb2.Hello], bool]


class DialledWorker:
    """A worker that has dialled: its stream, what it has said of itself, and where it is. See `Endpoint`."""

    def __init__(
        self, stream: MessageStream[worker_pb2.ConnectResponse], hello: worker_pb2.Hello, address: str
    ) -> None:
        self.stream = stream
        self.hello = hello
        self.host_address = address
        self.since_s = time.monotonic()

    async def open(self, max_bytes: int) -> MessageStream[worker_pb2.ConnectResponse]:
        self.stream.max_bytes = max_bytes
        return self.stream

    async def close(self) -> None:
        self.stream.close()


class NamedWorker:
    """A worker that this gateway has started or found: it is leased when it dials. See `Endpoint`."""

    # It is on this machine.
    host_address = ""

    def __init__(self, port: WorkerPort, name: str, lease: worker_pb2.Lease) -> None:
        self.epoch = lease.epoch
        self._port, self._name, self._lease = port, name, lease
        self._dialled: DialledWorker | None = None

    async def open(self, max_bytes: int) -> MessageStream[worker_pb2.ConnectResponse]:
        """Waits until it has taken its lease. The health check ends one that never does."""
        while True:
            worker = await self._port.take(lambda hello: hello.name == self._name)
            if await self._port.lease(worker, self._lease, is_watched=True):
                self._dialled = worker
                return await worker.open(max_bytes)

    async def close(self) -> None:
        if self._dialled is not None:
            await self._dialled.close()


class WorkerPort:
    """Owner of the listening socket, of connections without a lease, and of launchers that wait for one."""

    def __init__(self, listen: str, tls: ssl.SSLContext | None, key: bytes) -> None:
        """`key`: by which gateways know the leases that they have given. Gateways of a pool share it.

        tls: None for a Unix socket.
        """
        self._listen = listen
        self._tls = tls
        self._key = key
        self._warn = RareWarnings(__name__)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        # Workers that have a lease of one of these gateways are not sent away.
        self._gateway_ids: set[str] = set()
        # Connections before their hello, the oldest first: their addresses, and since when they are open.
        self._unknown: dict[asyncio.Task[None], tuple[str, float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._refusing: set[asyncio.Task[None]] = set()
        self._waiting: list[DialledWorker] = []
        # The launchers that wait for a worker, longest wait first.
        self._takers: dict[asyncio.Future[DialledWorker], Wants] = {}
        # By gateway id and epoch: a worker that dials again has lost that stream.
        self._leased: dict[tuple[str, int], MessageStream[worker_pb2.ConnectResponse]] = {}

    def join(self, gateway_id: str) -> None:
        """Accepts the workers of a gateway id. The first call opens the port. Raises CannotListen."""
        if self._listener is None:
            if self._listen.startswith(UNIX):
                self._listener = _unix_socket(self._listen)
            else:
                self._listener = listening_socket(self._listen)
                _log.info("workers can dial", pool_listen=self._listen)
            self._listener.setblocking(False)
            self._accepting = asyncio.create_task(self._accept(self._listener), name="worker-port")
        self._gateway_ids.add(gateway_id)

    def leave(self, gateway_id: str) -> None:
        """Its workers are sent away from now on. The last call closes the port."""
        self._gateway_ids.discard(gateway_id)
        for worker in [worker for worker in self._waiting if worker.hello.gateway_id == gateway_id]:
            self._drop(worker)
        if self._gateway_ids or self._listener is None or self._accepting is None:
            return
        for task in (self._accepting, *self._tasks):
            task.cancel()
        for worker in self._waiting[:]:
            self._drop(worker)
        # The event loop looks at it until then.
        listener, self._listener = self._listener, None
        self._accepting.add_done_callback(lambda _: listener.close())

    async def take(self, wants: Wants) -> DialledWorker:
        """One that is wanted, and waits no more: one with KV before others. Waits for one."""
        self._drop_ended()
        for worker in sorted(self._waiting, key=lambda worker: not worker.hello.gateway_id):
            if wants(worker.hello):
                self._waiting.remove(worker)
                return worker
        found: asyncio.Future[DialledWorker] = asyncio.get_running_loop().create_future()
        self._takers[found] = wants
        try:
            return await found
        except asyncio.CancelledError:
            if found.done() and not found.cancelled():
                self._offer(found.result())
            raise
        finally:
            self._takers.pop(found, None)

    async def lease(
        self, worker: DialledWorker, lease: worker_pb2.Lease, *, is_watched: bool = False
    ) -> bool:
        """Gives a worker a lease. False: it is gone, or has not taken it; it may dial again.

        is_watched: a health check ends one that does not answer.
        """
        lease.secret = self._secret_of(lease.gateway_id, lease.epoch)
        try:
            async with asyncio.timeout(None if is_watched else _ANSWER_TIMEOUT_S):
                await worker.stream.write(worker_pb2.ConnectRequest(lease=lease))
                await anext(worker.stream)
        except _BROKEN:
            worker.stream.close()
            _log.info("a worker has not taken its lease", address=worker.host_address)
            return False
        except BaseException:
            worker.stream.close()
            raise
        self._leased = {key: stream for key, stream in self._leased.items() if not stream.has_ended}
        self._leased[lease.gateway_id, lease.epoch] = worker.stream
        return True

    def end(self, gateway_id: str, epoch: int) -> None:
        """Closes the stream of a lease, if it is open."""
        stream = self._leased.pop((gateway_id, epoch), None)
        if stream is not None:
            stream.close()

    def _secret_of(self, gateway_id: str, epoch: int) -> str:
        return hmac.new(self._key, f"{gateway_id} {epoch}".encode(), "sha256").hexdigest()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, place = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            # On a Unix socket they have none.
            host, address = (place[0], f"{place[0]}:{place[1]}") if place else ("", "")
            task = self._keep(self._greet(connection, address))
            self._unknown[task] = host, time.monotonic()
            task.add_done_callback(functools.partial(self._greeted, connection))
            for oldest in beyond(_UNKNOWN, self._unknown, time.monotonic()):
                del self._unknown[oldest]
                oldest.cancel()

    def _greeted(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._unknown.pop(task, None)
        if task.cancelled():
            # It may not have begun.
            connection.close()

    def _keep(self, working: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task for a connection, until it is done."""
        task = asyncio.create_task(working, name="worker-port-connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _greet(self, connection: socket.socket, address: str) -> None:
        """From the connection to the hello."""
        stream = MessageStream(worker_pb2.ConnectResponse, _MAX_HELLO_BYTES)
        try:
            if self._tls is not None:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_UNKNOWN.timeout_s):
                transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: stream, connection, ssl=self._tls
                )
                if self._tls is not None and WORKER_NAME not in names_of_peer(transport):
                    self._warn(f"a connection from {address} without a worker's certificate was refused")
                    stream.close()
                    return
                hello = (await anext(stream)).hello
        except BaseException as error:
            stream.close()
            connection.close()
            if isinstance(error, _BROKEN):
                return
            raise
        self._arrived(DialledWorker(stream, hello, address))

    def _arrived(self, worker: DialledWorker) -> None:
        hello = worker.hello
        if refusal := self._refusal(hello):
            _log.debug("a worker was sent away", why=refusal, address=worker.host_address)
            self._refuse(worker.stream, refusal)
            return
        # Again and again, if it is not needed.
        _log.debug("a worker has dialled", address=worker.host_address)
        if hello.gateway_id:
            self.end(hello.gateway_id, hello.epoch)
        self._offer(worker)

    def _refuse(self, stream: MessageStream[worker_pb2.ConnectResponse], why: str) -> None:
        if len(self._refusing) >= _MAX_REFUSED:
            stream.close()
            return
        task = self._keep(_say_why(stream, why))
        self._refusing.add(task)
        task.add_done_callback(self._refusing.discard)

    def _refusal(self, hello: worker_pb2.Hello) -> str:
        """Why a worker is not accepted; empty: it is."""
        if hello.protocol != PROTOCOL:
            self._warn("a worker is of another version than this gateway")
            return "the gateway and the worker are of different versions"
        if hello.gateway_id:
            if hello.gateway_id not in self._gateway_ids:
                return "another gateway has this worker"
            if not hmac.compare_digest(
                hello.secret.encode(), self._secret_of(hello.gateway_id, hello.epoch).encode()
            ):
                self._warn("a worker does not have the secret of its lease")
                return "it does not have the secret of its lease"
        self._drop_ended()
        if len(self._waiting) >= _MAX_WAITING and self._taker_of(hello) is None:
            return "too many workers wait already"
        return ""

    def _taker_of(self, hello: worker_pb2.Hello) -> asyncio.Future[DialledWorker] | None:
        """The launcher that wants this worker and has waited longest. None: there is none."""
        for found, wants in self._takers.items():
            if not found.done() and wants(hello):
                return found
        return None

    def _offer(self, worker: DialledWorker) -> None:
        """Hands it to the first that wants it, or lets it wait."""
        found = self._taker_of(worker.hello)
        if found is not None:
            found.set_result(worker)
        else:
            self._waiting.append(worker)

    def _drop_ended(self) -> None:
        now_s = time.monotonic()
        for worker in self._waiting[:]:
            if worker.stream.has_ended or now_s - worker.since_s > _MAX_WAIT_S:
                self._drop(worker)

    def _drop(self, worker: DialledWorker) -> None:
        self._waiting.remove(worker)
        worker.stream.close()


async def _say_why(stream: MessageStream[worker_pb2.ConnectResponse], why: str) -> None:
    """Says why it is refused. The worker closes the stream then."""
    try:
        async with asyncio.timeout(_FAREWELL_S):
            await stream.write(worker_pb2.ConnectRequest(refusal=why))
            await anext(stream)
    except _BROKEN:
        pass
    finally:
        stream.close()


def _unix_socket(listen: str) -> socket.socket:
    """A socket in place of that of an earlier gateway. Raises CannotListen."""
    path = Path(listen.removeprefix(UNIX))
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        with short_path(str(path)) as short:
            made.bind(short)
        made.listen()
    except OSError:
        made.close()
        raise CannotListen(listen) from None
    return made
