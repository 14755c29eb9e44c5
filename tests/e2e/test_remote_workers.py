"""Workers that the gateway did not start: they dial it, with certificates of a pool."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from quire.v1 import executor_pb2 as pb

from tests import quire_command, undisturbed
from tests.e2e import greedy
from tests.e2e.several_gateways import SeveralGateways, retrying
from tests.forks import Forked
from tests.gateway_process import GatewayProcess
from tests.ports import free_address
from tests.tcp_proxy import TcpProxy
from workers.common import worker_pb2
from workers.common.message_stream import MessageStream
from workers.common.pool_tls import tls_context
from workers.common.protocol import GATEWAY_NAME, PROTOCOL

# Far more than any operation takes.
TIMEOUT_S = 60
# More than a page, of the shipped model's vocabulary.
PROMPT = [7 * i % 11 for i in range(1, 21)]


class Pool:
    """Certificates, and the workers that were started with them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificates = make_certificates(directory / "pool")
        # Where a gateway lets workers in.
        self.address = free_address()
        self.workers: list[Forked] = []

    def start_worker(self, *flags: str, certificates: Path | None = None) -> Forked:
        flags = ("--pool", str(certificates or self.certificates), "--threads", "1", *flags)
        self.workers.append(quire_command.start_worker(*flags, log=self.directory / "log"))
        return self.workers[-1]

    def add_worker(self, *flags: str) -> Forked:
        """Starts one that dials the gateway."""
        return self.start_worker("--gateway", self.address, *flags)

    def gateway(
        self,
        *flags: str,
        workers: int = 1,
        model: str = "paged-attention",
        state: str = "data",
        listen: str = "",
    ) -> GatewayProcess:
        place = ["--pool", str(self.certificates), "--data-dir", str(self.directory / state)]
        place += ["--pool-listen", listen or self.address]
        place += ["--orphan-grace-s", "60"]
        return GatewayProcess(model=model, workers=workers, flags=["--kv-pages", "256", *place, *flags])

    def stop(self) -> None:
        for worker in self.workers:
            # One that has only just begun would be killed by the signal.
            while worker.poll() is None and not has_children(worker):
                time.sleep(0.01)
            worker.terminate()
        for worker in self.workers:
            assert worker.wait(TIMEOUT_S) == 0


def make_certificates(directory: Path) -> Path:
    with quire_command.run("pool", "init", str(directory)) as made:
        assert made.wait(TIMEOUT_S) == 0
    return directory


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    made = Pool(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def process_of(worker: Forked) -> psutil.Process:
    """The process that computes, which the command starts again and again."""
    while True:
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(worker.pid).children()
            if children:
                return children[0]
        time.sleep(0.01)


def has_children(worker: Forked) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(worker.pid).children())
    return False


class Text(greedy.Text):
    """A cache, and the tokens that the model must choose: those of an undisturbed run."""

    def __init__(self, gateway: GatewayProcess, expected: list[int]) -> None:
        super().__init__(gateway, prompt=PROMPT)
        self.expected = expected

    def decode_on(self, gateway: GatewayProcess, count: int = 3) -> None:
        self.gateway = gateway
        assert self.decode(count) == self.expected[: len(self.tokens)]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed.greedy(PROMPT, 41)


def test_workers_come_back(pool: Pool, expected: list[int]) -> None:
    """A killed worker is started again, and its caches continue; a stopped gateway gives its workers back."""
    pool.add_worker()
    pool.add_worker()
    with pool.gateway(workers=2) as gateway:
        texts = [Text(gateway, expected) for _ in range(4)]
        assert {worker.pid for worker in gateway.status().workers} == {0}
        before = [process_of(worker) for worker in pool.workers]
        for process in before:
            process.kill()
            for text in texts:
                text.decode_on(gateway, 3)
            gateway.wait_until_ready()
        assert sum(text.replayed_tokens for text in texts) > 0
        now = [process_of(worker) for worker in pool.workers]
        assert not set(now) & set(before)
    # Given back, they end at once, and wait for the next gateway with empty pools.
    psutil.wait_procs(now, timeout=TIMEOUT_S)
    with pool.gateway(workers=2, state="other") as gateway:
        gateway.assert_pools_are_whole()
        Text(gateway, expected).decode_on(gateway, 3)


def test_next_gateway_finds_the_kv(pool: Pool, expected: list[int]) -> None:
    """After a crash, and after SIGUSR2, the worker still has it; a new one has waited no less."""
    pool.add_worker()
    with pool.gateway() as gateway:
        text = Text(gateway, expected)
        text.decode_on(gateway, 3)
        pool.add_worker()
        gateway.kill()
    with pool.gateway() as gateway:
        text.decode_on(gateway, 3)
        gateway.process.send_signal(signal.SIGUSR2)
        assert gateway.process.wait(TIMEOUT_S) == 0
    with pool.gateway() as gateway:
        text.decode_on(gateway, 3)
        assert text.replayed_tokens == 0


# All kinds of cuts: tests/hosts/test_gateways_on_hosts.py.
def test_cut_and_healed_network(pool: Pool, expected: list[int]) -> None:
    """Both sides find half-open connections. What was sent meanwhile arrives late, and changes nothing."""
    with TcpProxy(pool.address) as network:
        pool.start_worker("--gateway", network.address)
        with pool.gateway("--heartbeat-timeout-s", "1") as gateway:
            text = Text(gateway, expected)
            for cut in range(3):
                text.decode_on(gateway, 3)
                network.cut()
                if cut < 2:
                    lost = lambda: gateway.status().workers[0].state != pb.WORKER_STATE_READY  # noqa: E731
                    gateway.wait_until(lost)
                else:
                    network.break_connections()
                network.heal()
                gateway.wait_until_ready()
            text.decode_on(gateway, 3)
            assert gateway.release(text.cache_id)
            gateway.assert_pools_are_whole()


def test_hung_worker(pool: Pool, expected: list[int]) -> None:
    """No signal of the gateway reaches it: the command that started it kills it, and starts another."""
    worker = pool.add_worker("--hang-timeout-s", "2")
    with pool.gateway("--heartbeat-timeout-s", "1") as gateway:
        text = Text(gateway, expected)
        text.decode_on(gateway, 3)
        hung = process_of(worker)
        hung.suspend()
        text.decode_on(gateway, 3)
        last = process_of(worker)
        assert text.replayed_tokens > 0 and last != hung
        # Nor does one outlive its command.
        last.suspend()
        pool.stop()
        assert not last.is_running()


def test_a_paused_worker_keeps_its_model_and_its_kv(pool: Pool, expected: list[int]) -> None:
    """Before, it ended when it went on, and its successor had to load the model and to compute all KV."""
    worker = pool.add_worker()
    with pool.gateway("--heartbeat-timeout-s", "1") as gateway:
        text = Text(gateway, expected)
        text.decode_on(gateway, 3)
        paused = process_of(worker)
        paused.suspend()
        gateway.wait_until(lambda: gateway.status().workers[0].state != pb.WORKER_STATE_READY)
        paused.resume()
        text.decode_on(gateway, 3)
        assert text.replayed_tokens == 0 and process_of(worker) == paused


def test_several_gateways_of_one_host(pool: Pool) -> None:
    """Each has a port, and a worker finds the one that needs it. Their shards' workers come back to them."""
    host, _, port = pool.address.rpartition(":")
    both = f"{pool.address},{host}:{int(port) + 1}"
    for _ in range(2):
        pool.start_worker("--gateway", both)
    flags = ("--pool", str(pool.certificates), "--pool-listen", pool.address, "--orphan-grace-s", "60")
    with SeveralGateways(2, pool.directory / "data", flags) as server:
        server.wait_until_ready()
        prefill = pb.PrefillRequest(token_ids=PROMPT)
        answers = [stub.Prefill(prefill, timeout=TIMEOUT_S) for stub in server.stubs()]
        for killed in server.gateways():
            killed.kill()
        for made in answers:
            request = pb.DecodeRequest(cache_id=made.kv_cache.cache_id, token_id=1, position=len(PROMPT))
            answer: pb.DecodeResponse = retrying(server.stub.Decode, request)  # type: ignore[assignment]
            assert answer.kv_cache.seq_len == len(PROMPT) + 1 and not answer.replayed_tokens


def test_one_gateway_at_a_time(pool: Pool, expected: list[int]) -> None:
    """Another gateway gets a worker when the first is gone, with the right protocol and certificate."""
    other = free_address()
    pool.start_worker("--gateway", f"{other},{pool.address}")
    with pool.gateway("--orphan-grace-s", "1") as first:
        text = Text(first, expected)
        second = pool.gateway(state="other", listen=other)
        text.decode_on(first, 5)
        strangers = make_certificates(pool.directory / "strangers")
        pool.start_worker("--gateway", pool.address, certificates=strangers)
        assert refusal(pool, worker_pb2.Hello(protocol="another")) == DIFFERENT
        of_other = worker_pb2.Hello(protocol=PROTOCOL, gateway_id="another", epoch=1)
        assert refusal(pool, of_other) == "another gateway has this worker"
        assert refusal(pool, worker_pb2.Hello(protocol=PROTOCOL), role="gateway") is None
        text.decode_on(first, 5)
        assert text.replayed_tokens == 0
        first.kill()
        with second:
            Text(second, expected).decode_on(second, 5)


DIFFERENT = "the gateway and the worker are of different versions"


def refusal(pool: Pool, hello: worker_pb2.Hello, role: str = "worker") -> str | None:
    """What the gateway answers to one that dials. None: it closes the connection."""

    async def dial() -> str | None:
        tls = tls_context(pool.certificates, role, is_server=False)
        stream = MessageStream(worker_pb2.ConnectRequest, 1 << 16)
        host, _, port = pool.address.rpartition(":")
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.get_running_loop().create_connection(
                lambda: stream, host, int(port), ssl=tls, server_hostname=GATEWAY_NAME
            )
            await stream.write(worker_pb2.ConnectResponse(hello=hello))
            try:
                return (await anext(stream)).refusal
            except StopAsyncIteration:
                return None
            finally:
                stream.close()
                await asyncio.sleep(0)  # the transport closes its socket then

    return asyncio.run(dial())
