"""Workers that the gateway did not start: at addresses, or such as call it, with certificates of a pool."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from quire.v1 import executor_pb2 as pb
from quire.v1 import worker_pb2, worker_pb2_grpc

from tests import quire_command, undisturbed
from tests.forks import Forked
from tests.gateway_process import GatewayProcess
from tests.tcp_proxy import TcpProxy

# Far more than any operation takes.
TIMEOUT_S = 60
# More than a page, of the shipped model's vocabulary.
PROMPT = [7 * i % 11 for i in range(1, 21)]


class Pool:
    """Certificates, and the workers that were started with them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.certificates = make_certificates(directory / "pool")
        self.workers: list[Forked] = []

    def start_worker(self, *flags: str, certificates: Path | None = None) -> Forked:
        flags = ("--pool", str(certificates or self.certificates), "--threads", "1", *flags)
        self.workers.append(quire_command.start_worker(*flags, log=self.directory / "log"))
        return self.workers[-1]

    def listen(self) -> str:
        """Starts a worker that listens. Returns its address."""
        address = free_address()
        self.start_worker("--listen", address)
        return address

    def gateway(
        self, *flags: str, workers: int = 1, model: str = "paged-attention", state: str = "data"
    ) -> GatewayProcess:
        place = ["--pool", str(self.certificates), "--data-dir", str(self.directory / state)]
        place += ["--orphan-grace-s", "60"]
        return GatewayProcess(model=model, workers=workers, flags=["--kv-pages", "256", *place, *flags])

    def stop(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            assert worker.wait(TIMEOUT_S) == 0


def make_certificates(directory: Path) -> Path:
    with quire_command.run("pool", "init", str(directory)) as made:
        assert made.wait(TIMEOUT_S) == 0
    return directory


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


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


class Text:
    """A cache, and the tokens that the model must choose: those of an undisturbed run."""

    def __init__(self, gateway: GatewayProcess, expected: list[int]) -> None:
        answer = gateway.stub.Prefill(pb.PrefillRequest(token_ids=PROMPT), timeout=TIMEOUT_S)
        self.cache_id, self.length = answer.kv_cache.cache_id, answer.kv_cache.seq_len
        self.tokens = [answer.output.token_id]
        self.expected = expected
        self.replayed = 0

    def decode(self, gateway: GatewayProcess, count: int = 3) -> None:
        for _ in range(count):
            # A position that is not the length is refused.
            request = pb.DecodeRequest(cache_id=self.cache_id, token_id=self.tokens[-1], position=self.length)
            answer = gateway.stub.Decode(request, timeout=TIMEOUT_S, wait_for_ready=True)
            self.length += 1
            assert answer.kv_cache.seq_len == self.length
            self.replayed += answer.replayed_tokens
            self.tokens.append(answer.output.token_id)
        assert self.tokens == self.expected[: len(self.tokens)]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return undisturbed.greedy(PROMPT, 41)


def say(gateway: GatewayProcess, event: str) -> Callable[[], bool]:
    return lambda: any(record["event"] == event for record in gateway.records())


def test_workers_at_addresses(pool: Pool, expected: list[int]) -> None:
    """A killed worker is started again, and its caches continue; a stopped gateway gives its workers back."""
    addresses = [pool.listen(), pool.listen()]
    with pool.gateway("--workers-at", ",".join(addresses), workers=2) as gateway:
        texts = [Text(gateway, expected) for _ in range(4)]
        assert {worker.pid for worker in gateway.status().workers} == {0}
        before = [process_of(worker) for worker in pool.workers]
        for process in before:
            process.kill()
            for text in texts:
                text.decode(gateway, 3)
            gateway.wait_until_ready()
        assert sum(text.replayed for text in texts) > 0
        now = [process_of(worker) for worker in pool.workers]
        assert not set(now) & set(before)
    # Given back, they end at once, and wait for the next gateway with empty pools.
    psutil.wait_procs(now, timeout=TIMEOUT_S)
    # The default, which addresses override.
    flags = "--workers-at", ",".join(addresses), "--workers", "1"
    with pool.gateway(*flags, workers=2, state="other") as gateway:
        assert [r["workers"] for r in gateway.records() if r["event"] == "listening"] == [2]
        gateway.assert_pools_are_whole()
        Text(gateway, expected).decode(gateway, 3)


def test_next_gateway_finds_the_kv(pool: Pool, expected: list[int]) -> None:
    """After a crash, and after SIGUSR2, the workers still have it."""
    address = pool.listen()
    with pool.gateway("--workers-at", address) as gateway:
        text = Text(gateway, expected)
        text.decode(gateway, 3)
        gateway.kill()
    with pool.gateway("--workers-at", address) as gateway:
        text.decode(gateway, 3)
        gateway.process.send_signal(signal.SIGUSR2)
        assert gateway.process.wait(TIMEOUT_S) == 0
    with pool.gateway("--workers-at", address) as gateway:
        text.decode(gateway, 3)
        assert text.replayed == 0


def test_workers_call_the_gateway(pool: Pool, expected: list[int]) -> None:
    """From behind a firewall. They call again when the gateway comes back, and still have the KV."""
    address = free_address()
    listening = "--pool-listen", address
    pool.start_worker("--gateway", address)
    with pool.gateway(*listening) as gateway:
        text = Text(gateway, expected)
        text.decode(gateway, 3)
        gateway.kill()
    pool.start_worker("--gateway", address)
    with pool.gateway(*listening, workers=2) as gateway:
        text.decode(gateway, 3)
        process_of(pool.workers[0]).kill()
        text.decode(gateway, 3)
        gateway.wait_until_ready()


# Of a worker that is called all kinds of cuts: tests/hosts/test_hosts.py.
@pytest.mark.parametrize(
    "calls", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["called", "calling"]
)
def test_cut_and_healed_network(pool: Pool, expected: list[int], *, calls: bool) -> None:
    """Both sides find half-open connections. What was sent meanwhile arrives late, and changes nothing."""
    address = free_address()
    quick = "--heartbeat-timeout-s", "1"
    with TcpProxy(address) as network:
        if calls:
            pool.start_worker("--gateway", network.address)
            flags = "--pool-listen", address
        else:
            pool.start_worker("--listen", address)
            flags = "--workers-at", network.address
        with pool.gateway(*flags, *quick) as gateway:
            text = Text(gateway, expected)
            for cut in range(3):
                text.decode(gateway, 3)
                network.cut()
                if cut < 2:
                    lost = lambda: gateway.status().workers[0].state != pb.WORKER_STATE_READY  # noqa: E731
                    gateway.wait_until(lost)
                else:
                    network.break_connections()
                network.heal()
                gateway.wait_until_ready()
            text.decode(gateway, 3)
            released = pb.ReleaseCacheRequest(cache_id=text.cache_id)
            assert gateway.stub.ReleaseCache(released, timeout=TIMEOUT_S).released
            gateway.assert_pools_are_whole()


def test_hung_worker(pool: Pool, expected: list[int]) -> None:
    """No signal of the gateway reaches it: the command that started it kills it, and starts another."""
    address = free_address()
    worker = pool.start_worker("--listen", address, "--hang-timeout-s", "2")
    with pool.gateway("--workers-at", address, "--heartbeat-timeout-s", "1") as gateway:
        text = Text(gateway, expected)
        text.decode(gateway, 3)
        hung = process_of(worker)
        hung.suspend()
        text.decode(gateway, 3)
        assert text.replayed > 0 and process_of(worker) != hung


def test_far_worker(pool: Pool, expected: list[int]) -> None:
    """The handshakes of its connection take longer than the time between two attempts."""
    with (
        TcpProxy(pool.listen(), delay_s=0.15) as network,
        pool.gateway("--workers-at", network.address) as gateway,
    ):
        Text(gateway, expected).decode(gateway, 3)


def test_one_gateway_at_a_time(pool: Pool, expected: list[int]) -> None:
    """Another gateway gets a worker when the first is gone, with the right protocol and certificate."""
    address = pool.listen()
    with pool.gateway("--workers-at", address, "--orphan-grace-s", "1") as first:
        text = Text(first, expected)
        second = pool.gateway("--workers-at", address, state="other")
        refused = "refused the lease: another gateway has this worker"
        # More often than a gateway tries to start workers of its own machine.
        second.wait_until(lambda: second.log().count(refused) > 5)
        text.decode(first, 5)
        assert text.replayed == 0
        lease = worker_pb2.Lease(gateway_id="x", epoch=1, protocol="another")
        assert lease_refusal(pool, address, lease) is grpc.StatusCode.FAILED_PRECONDITION
        worker = pool.certificates / "worker.pem", pool.certificates / "worker-key.pem"
        assert lease_refusal(pool, address, lease, *worker) is grpc.StatusCode.UNAUTHENTICATED
        strangers = make_certificates(pool.directory / "strangers")
        stranger = strangers / "gateway.pem", strangers / "gateway-key.pem"
        assert lease_refusal(pool, address, lease, *stranger) is grpc.StatusCode.UNAVAILABLE
        text.decode(first, 5)
        first.kill()
        with second:
            Text(second, expected).decode(second, 5)


def lease_refusal(
    pool: Pool,
    address: str,
    lease: worker_pb2.Lease,
    certificate: Path | None = None,
    key: Path | None = None,
) -> grpc.StatusCode:
    certificate = certificate or pool.certificates / "gateway.pem"
    key = key or pool.certificates / "gateway-key.pem"
    credentials = grpc.ssl_channel_credentials(
        (pool.certificates / "ca.pem").read_bytes(), key.read_bytes(), certificate.read_bytes()
    )
    options = [("grpc.ssl_target_name_override", "worker.quire")]
    with grpc.secure_channel(address, credentials, options) as channel:
        requests = itertools.chain([worker_pb2.ConnectRequest(lease=lease)], forever())
        answers = worker_pb2_grpc.WorkerServiceStub(channel).Connect(requests, timeout=TIMEOUT_S)
        with pytest.raises(grpc.RpcError):
            next(answers)
        return answers.code()


def forever() -> Iterator[worker_pb2.ConnectRequest]:
    time.sleep(TIMEOUT_S)
    yield worker_pb2.ConnectRequest()
