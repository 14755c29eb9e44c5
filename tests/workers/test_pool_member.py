"""A process that no gateway has started: whom it dials, and what a lease makes of it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from service.pool import pool_files
from service.pool.worker_port import WorkerPort
from workers import pool_member
from workers.common import worker_pb2
from workers.common.pool_tls import tls_context
from workers.common.protocol import EXIT_CONFIG
from workers.executors.weightless import PagedAttentionExecutor
from workers.orphan_timer import OrphanTimer
from workers.pool_member import PoolMember
from workers.process import EXIT_FAILED, Parent
from workers.scheduler import Scheduler
from workers.server import WorkerServer

# A gateway's first message from 2026-11-28 on, to one that it sends away: it keeps its numbers, so that the
# worker's log can say why.
REFUSAL = bytes.fromhex("22") + bytes([9]) + b"different"
PATIENCE_S = 30
LENGTH = struct.Struct("<I")


class Bench:
    """A member in this process, whose worker has not loaded its model, and the ports of two gateways."""

    def __init__(self, pool: Path, kind: str, ports: list[WorkerPort], addresses: list[str]) -> None:
        self.pool, self.ports, self.addresses = pool, ports, addresses
        self.configs: list[worker_pb2.WorkerConfig] = []
        self.alarms: list[float] = []
        self.member = PoolMember(worker_pb2.WorkerConfig(threads=3))
        self.tls = tls_context(pool, "worker", is_server=False) if kind == "tls" else None
        self.dialling = asyncio.create_task(self.member.dial(addresses, self.tls))

    def make(self, config: worker_pb2.WorkerConfig, _: object) -> WorkerServer:
        self.configs.append(config)
        timer = OrphanTimer(config.orphan_grace_s, set_alarm=self.alarms.append)
        executor = PagedAttentionExecutor.create(kv_pages=8)
        return WorkerServer(lambda _: executor, lambda _: Scheduler(16, 16, max_rows=16), orphan_timer=timer)

    async def take(self, gateway: int = 0) -> worker_pb2.Hello:
        """What it says to a gateway, which gives it no lease."""
        async with asyncio.timeout(PATIENCE_S):
            worker = await self.ports[gateway].take(lambda _: True)
        worker.stream.close()
        return worker.hello

    async def lease(self, epoch: int, gateway: int = 0, gateway_id: str = "", **config: object) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            worker = await self.ports[gateway].take(lambda _: True)
            lease = worker_pb2.Lease(gateway_id=gateway_id or f"g{gateway}", epoch=epoch)
            lease.config.MergeFrom(
                worker_pb2.WorkerConfig(**({"model": "adder", "orphan_grace_s": 60} | config))  # type: ignore[arg-type]
            )
            return await self.ports[gateway].lease(worker, lease)


@pytest.fixture
def kind() -> str:
    return "unix"


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> AsyncIterator[Bench]:
    pool_files.write_certificates(tmp_path, 1)
    ports, addresses = [], []
    for number in range(2):
        path = f"unix:{tmp_path}/{number}"
        over_tls = kind == "tls"
        port = pool_files.worker_port("127.0.0.1:0", tmp_path) if over_tls else WorkerPort(path, None, b"key")
        port.join(f"g{number}")
        assert port._listener is not None
        ports.append(port)
        addresses.append(f"127.0.0.1:{port._listener.getsockname()[1]}" if over_tls else path)
    made = Bench(tmp_path, kind, ports, addresses)
    monkeypatch.setattr(pool_member, "make_worker", made.make)
    monkeypatch.setattr(pool_member, "configure_logging", lambda _: None)
    monkeypatch.setattr(pool_member, "OrphanTimer", lambda _: None)

    async def run(worker: WorkerServer, *_: object) -> int:
        await worker.ended
        return 0

    monkeypatch.setattr(pool_member, "run_worker", run)
    yield made
    if made.member._worker is not None:
        made.member._worker.end()
        await made.member.done
    made.dialling.cancel()
    await asyncio.wait([made.dialling])
    for port in ports:
        for number in range(2):
            port.leave(f"g{number}")
        port.leave("another")
    await asyncio.sleep(0.05)  # sockets are closed then


async def test_the_lease_decides_the_configuration(bench: Bench) -> None:
    """But for what this host decides."""
    assert await bench.lease(1, threads=1, workers=4)
    (used,) = bench.configs
    assert (used.threads, used.workers) == (3, 4)


@pytest.mark.parametrize("kind", ["unix", "tls"])
async def test_it_goes_back_to_its_gateway_and_shows_its_lease(bench: Bench) -> None:
    """Its grace begins when its stream ends, and ends with a lease."""
    assert await bench.lease(5)
    assert bench.alarms[-1] == 0
    bench.ports[0].end("g0", 5)
    hello = await bench.take()
    assert (hello.gateway_id, hello.epoch) == ("g0", 5) and hello.secret
    assert bench.alarms[-1] > 0, "to be let in is no lease"
    assert await bench.lease(6)
    assert len(bench.configs) == 1, "the worker is the same"
    while bench.alarms[-1]:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("kind", ["tls"])
async def test_what_is_no_name_of_a_host_keeps_no_gateway_out(bench: Bench) -> None:
    member = PoolMember(worker_pb2.WorkerConfig(), name="other")
    dialling = asyncio.create_task(member.dial(["no..host:1", bench.addresses[0]], bench.tls))
    async with asyncio.timeout(PATIENCE_S):
        worker = await bench.ports[0].take(lambda hello: hello.name == "other")
    worker.stream.close()
    dialling.cancel()
    await asyncio.wait([dialling])


async def test_a_bug_of_dialling_ends_the_process(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is started again then."""

    async def dial(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(PoolMember, "dial", dial)
    monkeypatch.setattr("sys.argv", ["", "--pool", str(bench.pool), "--gateway", "127.0.0.1:1"])
    parent = cast(Parent, None)
    async with asyncio.timeout(PATIENCE_S):
        assert await pool_member._serve(pool_member._parse_arguments(), parent) == EXIT_FAILED


async def test_it_dials_the_next_gateway_when_one_does_not_want_it(bench: Bench) -> None:
    """The next owner of a shard finds the workers of the shard."""
    assert await bench.lease(5)
    bench.ports[0].leave("g0")
    bench.ports[0].end("g0", 5)
    bench.ports[1].join("g0")
    assert await bench.lease(9, gateway=1, gateway_id="g0")
    assert len(bench.configs) == 1


async def test_it_waits_at_each_gateway_for_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """None may need it, but the other one."""
    monkeypatch.setattr(pool_member, "_WAIT_S", 0.1)
    assert await bench.lease(1, gateway=1)


@pytest.mark.parametrize("kind", ["tls"])
async def test_a_name_may_be_that_of_several_gateways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of the pods behind a headless Service."""
    bench.dialling.cancel()
    await asyncio.wait([bench.dialling])
    port = bench.addresses[0].rpartition(":")[2]
    other = pool_files.worker_port(f"127.0.0.2:{port}", bench.pool)
    other.join("g2")

    async def getaddrinfo(host: str, port: str, **_: object) -> list[object]:
        return [(0, 0, 0, "", (address, int(port))) for address in ("127.0.0.1", "127.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(pool_member, "_WAIT_S", 0.1)
    bench.ports.append(other)
    bench.dialling = asyncio.create_task(bench.member.dial([f"gateways:{port}"], bench.tls))
    assert await bench.lease(1, gateway=2)
    other.leave("g2")


async def test_the_log_says_once_why_there_is_no_lease(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(pool_member._log, "warning", lambda _, **fields: said.append(fields["why"]))
    assert await bench.lease(5)
    for number in range(2):
        bench.ports[number].join("another")
        bench.ports[number].leave("g0")
    bench.ports[0].end("g0", 5)
    await asyncio.sleep(0.5)  # some rounds
    assert said == ["another gateway has this worker"] * 2, "of each gateway"


@pytest.mark.parametrize(("epoch", "gateway_id"), [(4, "g0"), (6, "g1")], ids=["earlier", "another's"])
async def test_a_lease_that_is_not_its_gateways_next_one_is_not_taken(
    bench: Bench, epoch: int, gateway_id: str
) -> None:
    assert await bench.lease(5)
    bench.ports[0].end("g0", 5)
    assert not await bench.lease(epoch, gateway_id=gateway_id)
    assert await bench.lease(7), "it goes on"


async def test_a_lease_is_taken_again_if_the_answer_was_lost(bench: Bench) -> None:
    """The gateway has not used that stream."""
    assert await bench.lease(5)
    bench.ports[0].end("g0", 5)
    assert await bench.lease(5)
    assert len(bench.configs) == 1


async def test_another_configuration_ends_it(bench: Bench) -> None:
    assert await bench.lease(5)
    bench.ports[0].end("g0", 5)
    assert not await bench.lease(6, max_batch_tokens=7)
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.member.done == 0


async def test_a_bad_configuration_does_not_end_what_starts_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next lease may have another one."""

    async def refuse(*_: object) -> int:
        return EXIT_CONFIG

    monkeypatch.setattr(pool_member, "run_worker", refuse)
    assert await bench.lease(1)
    async with asyncio.timeout(PATIENCE_S):
        assert await bench.member.done not in (0, EXIT_CONFIG)
    bench.member._worker = None


@pytest.mark.parametrize(
    "said", [LENGTH.pack(2), LENGTH.pack(2) + b"\x0a", LENGTH.pack(1 << 30), LENGTH.pack(3) + b"\xff\xff\xff"]
)
async def test_what_is_no_message_ends_the_stream(bench: Bench, said: bytes) -> None:
    """Also one that does not arrive as a whole. The worker dials again."""
    async with asyncio.timeout(PATIENCE_S):
        worker = await bench.ports[0].take(lambda _: True)
    given = worker_pb2.Lease(gateway_id="g0", epoch=5)
    given.config.MergeFrom(
        worker_pb2.WorkerConfig(model="adder", orphan_grace_s=60, max_request_bytes=1 << 16)
    )
    assert await bench.ports[0].lease(worker, given)
    transport = worker.stream._transport
    assert transport is not None
    transport.write(said)
    transport.close()
    hello = await bench.take()
    assert (hello.gateway_id, hello.epoch) == ("g0", 5)
    assert await bench.lease(6, max_request_bytes=1 << 16)


def test_versions_can_tell_each_other_that_they_differ() -> None:
    """These fields keep their numbers."""
    assert worker_pb2.ConnectRequest.FromString(REFUSAL).refusal == "different"
    hello = worker_pb2.ConnectResponse.FromString(bytes.fromhex("1a060a04") + b"2026").hello
    assert hello.protocol == "2026"
