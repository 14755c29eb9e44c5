"""The port that workers dial: who is let in, who gets whom, and what keeps nobody out."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from service.config import Config
from service.handshakes import HandshakeLimits
from service.pool import pool_files, worker_port
from service.pool.remote import RemoteLauncher
from service.pool.worker_port import DialledWorker, NamedWorker, WorkerPort
from tests.ports import free_port
from workers.common import worker_pb2
from workers.common.message_stream import MessageStream
from workers.common.pool_tls import tls_context
from workers.common.protocol import GATEWAY_NAME, PROTOCOL

# Far more than anything takes.
PATIENCE_S = 30
OURS = "our gateway"


class Worker:
    """A worker's end of a stream."""

    def __init__(
        self, stream: MessageStream[worker_pb2.ConnectRequest], transport: asyncio.BaseTransport
    ) -> None:
        self.stream, self.transport = stream, transport

    async def says(self, **hello: object) -> None:
        message = worker_pb2.Hello(**({"protocol": PROTOCOL} | hello))  # type: ignore[arg-type]
        await self.stream.write(worker_pb2.ConnectResponse(hello=message))

    async def next(self) -> worker_pb2.ConnectRequest | None:
        """None: the connection has ended."""
        async with asyncio.timeout(PATIENCE_S):
            return await anext(self.stream, None)

    async def refusal(self) -> str:
        """Why it is sent away, which is the next that it is told."""
        said = await self.next()
        assert said is not None
        return said.refusal

    async def lease(self) -> worker_pb2.Lease:
        """Takes the next lease."""
        message = await self.next()
        assert message is not None
        await self.stream.write(worker_pb2.ConnectResponse())
        return message.lease


class Site:
    """A port with TLS or a Unix socket, and workers, with certificates of the pool."""

    def __init__(self, pool: Path, kind: str) -> None:
        self.pool = pool
        self.place: Any
        if kind == "tls":
            self.place = ("127.0.0.1", free_port())
            self.port: WorkerPort = pool_files.worker_port(f"127.0.0.1:{self.place[1]}", pool)
        else:
            self.place = str(pool / "s")
            self.port = WorkerPort(f"unix:{self.place}", None, b"key")
        self.port.join(OURS)
        self.workers: list[Worker] = []

    async def dial(self, role: str = "worker") -> Worker:
        stream = MessageStream(worker_pb2.ConnectRequest, 1 << 16)
        transport: asyncio.BaseTransport
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            if isinstance(self.place, str):
                transport, _ = await loop.create_unix_connection(lambda: stream, self.place)
            else:
                tls = tls_context(self.pool, role, is_server=False)
                transport, _ = await loop.create_connection(
                    lambda: stream, *self.place, ssl=tls, server_hostname=GATEWAY_NAME
                )
        self.workers.append(Worker(stream, transport))
        return self.workers[-1]

    def connect(self) -> socket.socket:
        """A connection that says nothing. Blocks."""
        if not isinstance(self.place, str):
            return socket.create_connection(self.place)
        made = socket.socket(socket.AF_UNIX)
        made.connect(self.place)
        return made

    async def greeted(self, **hello: object) -> Worker:
        """A worker that has said who it is."""
        worker = await self.dial()
        await worker.says(**hello)
        return worker

    async def waits(self, **hello: object) -> Worker:
        """A worker that waits for a lease."""
        before, worker = len(self.port._waiting), await self.greeted(**hello)
        while len(self.port._waiting) == before:
            await asyncio.sleep(0.01)
        return worker

    async def take(self, name: str = "") -> DialledWorker:
        async with asyncio.timeout(PATIENCE_S):
            return await self.port.take(lambda hello: hello.name == name)

    async def leased(self, worker: Worker, epoch: int, gateway_id: str = OURS) -> worker_pb2.Lease:
        """Gives a lease to the next that waits, which is to be this one."""
        given = worker_pb2.Lease(gateway_id=gateway_id, epoch=epoch)
        leasing = asyncio.create_task(self.port.lease(await self.take(), given))
        found = await worker.lease()
        assert await leasing
        return found


@pytest.fixture(params=["tls", "unix"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def site(tmp_path: Path, kind: str) -> AsyncIterator[Site]:
    pool_files.write_certificates(tmp_path, 1)
    made = Site(tmp_path, kind)
    yield made
    for worker in made.workers:
        worker.stream.close()
    made.port.leave(OURS)
    await asyncio.sleep(0.05)  # sockets are closed then


async def test_a_lease_goes_to_the_worker_that_has_waited_longest(site: Site) -> None:
    first, _ = await site.waits(), await site.waits()
    found = await site.leased(first, 7)
    assert (found.gateway_id, found.epoch) == (OURS, 7) and found.secret


async def test_one_with_kv_is_preferred_and_a_named_one_is_for_who_asks(site: Site) -> None:
    first = await site.waits()
    lease = await site.leased(first, 1)
    first.stream.close()
    named, _ = await site.waits(name="a"), await site.waits()
    again = await site.waits(gateway_id=OURS, epoch=1, secret=lease.secret)
    await site.leased(again, 2)
    assert (await site.take("a")).hello.name == "a" and not named.stream.has_ended


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"protocol": "another"}, "the gateway and the worker are of different versions"),
        ({"protocol": ""}, "the gateway and the worker are of different versions"),
        ({"gateway_id": "another", "epoch": 1}, "another gateway has this worker"),
        ({"gateway_id": OURS, "epoch": 1, "secret": "guessed"}, "it does not have the secret of its lease"),
        ({"gateway_id": OURS, "epoch": 1, "secret": "\u00e9"}, "it does not have the secret of its lease"),
    ],
)
async def test_who_is_sent_away_and_told_why(site: Site, hello: dict[str, object], why: str) -> None:
    worker = await site.waits()
    await site.leased(worker, 1)
    assert await (await site.greeted(**hello)).refusal() == why
    assert not worker.stream.has_ended, "who has the lease is left alone"


@pytest.mark.parametrize("kind", ["tls"])
async def test_a_gateway_of_the_pool_is_no_worker(site: Site) -> None:
    posing = await site.dial("gateway")
    with contextlib.suppress(ConnectionError):
        await posing.says()
    assert await posing.next() is None and not site.port._waiting


@pytest.mark.parametrize("kind", ["tls"])
async def test_a_certificate_of_another_pool_is_none(
    site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strangers = tmp_path_factory.mktemp("strangers")
    pool_files.write_certificates(strangers, 1)
    # It trusts the gateway, which does not trust it.
    (strangers / "ca.pem").write_bytes((site.pool / "ca.pem").read_bytes())
    site.pool = strangers
    stranger = await site.dial()
    with contextlib.suppress(ConnectionError):
        await stranger.says()
    assert await stranger.next() is None and not site.port._waiting


async def test_who_says_nothing_is_sent_away(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_port, "_UNKNOWN", HandshakeLimits(64, 32, 0.2))
    silent = await site.dial()
    assert await silent.next() is None
    # Not even TLS.
    with await asyncio.to_thread(site.connect) as mute:
        assert await asyncio.to_thread(mute.recv, 1) == b""


async def test_workers_without_need_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_port, "_MAX_WAITING", 1)
    first = await site.waits()
    assert await (await site.greeted()).refusal() == "too many workers wait already"
    # Those that are gone do not count.
    first.stream.close()
    await asyncio.sleep(0.1)
    await site.leased(await site.greeted(), 1)


async def test_who_is_refused_holds_few_connections(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_port, "_MAX_REFUSED", 1)
    monkeypatch.setattr(worker_port, "_FAREWELL_S", PATIENCE_S)
    told = await site.greeted(protocol="another")
    assert await told.refusal()
    other = await site.greeted(protocol="another")
    assert await other.next() is None
    # Who closes the stream makes room.
    told.stream.close()
    assert await told.next() is None
    while site.port._refusing:
        await asyncio.sleep(0.01)
    assert await (await site.greeted(protocol="another")).refusal()


async def test_one_that_is_wanted_is_let_in_although_too_many_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them may be the worker that a gateway has started, and one that has its KV."""
    monkeypatch.setattr(worker_port, "_MAX_WAITING", 1)
    await site.waits()
    taking = asyncio.create_task(site.take("a"))
    await asyncio.sleep(0)
    await site.greeted(name="a")
    assert (await taking).hello.name == "a"


async def test_one_that_is_gone_or_silent_takes_no_lease(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_port, "_ANSWER_TIMEOUT_S", 0.2)
    silent = await site.waits()
    assert not await site.port.lease(await site.take(), worker_pb2.Lease(gateway_id=OURS, epoch=1))
    assert await silent.next() is not None and await silent.next() is None
    gone = await site.waits()
    taken = await site.take()
    gone.stream.close()
    assert not await site.port.lease(taken, worker_pb2.Lease(gateway_id=OURS, epoch=2))


async def test_shards_share_the_port(site: Site) -> None:
    """A worker that has lost its shard is sent to the next owner; the port stays while there is one."""
    site.port.join("another shard")
    worker = await site.waits()
    lease = await site.leased(worker, 1, "another shard")
    site.port.leave("another shard")
    site.port.end("another shard", 1)
    assert await worker.next() is None
    again = await site.greeted(gateway_id="another shard", epoch=1, secret=lease.secret)
    assert await again.refusal() == "another gateway has this worker"
    site.port.leave(OURS)
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionRefusedError):
        await site.dial()


async def test_a_named_worker_is_leased_when_it_dials(site: Site) -> None:
    """However often its stream breaks before it has taken its lease."""
    named = NamedWorker(site.port, "worker-0-7", worker_pb2.Lease(gateway_id=OURS, epoch=9))
    opening = asyncio.create_task(named.open(1 << 20))
    await site.waits()
    hasty = await site.greeted(name="worker-0-7")
    assert await hasty.next() is not None and not opening.done()
    hasty.stream.close()
    worker = await site.greeted(name="worker-0-7")
    lease = await worker.lease()
    assert (lease.gateway_id, lease.epoch, named.epoch) == (OURS, 9, 9) and lease.secret
    stream = await opening
    assert stream.max_bytes == 1 << 20
    await named.close()
    assert await worker.next() is None


async def test_what_is_true_of_this_machine_is_not_said_to_others(site: Site) -> None:
    """How many share its cores, and what was proved on its processor."""
    launcher = RemoteLauncher(None, Config(), site.port)
    config = worker_pb2.WorkerConfig(model="m", workers=4, model_was_proved=True, threads=3)
    worker = await site.waits()
    await launcher.adopt([config])
    vars(launcher)["_finds_own_until_s"] = 0.0
    starting = asyncio.create_task(launcher.start(config))
    lease = await worker.lease()
    assert (lease.config.model, lease.config.threads) == ("m", 3)
    assert (lease.config.workers, lease.config.model_was_proved) == (1, False)
    await starting
    launcher.close()
