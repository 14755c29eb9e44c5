"""Gateways that share shards by leases in PostgreSQL: forwarding, takeover, a rolling upgrade."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from quire import Client
from quire.v1 import executor_pb2 as pb
from quire.v1 import executor_pb2_grpc

from service.auth.authenticator import HOP
from tests import undisturbed
from tests.e2e.greedy import Text as AdaptedText
from tests.e2e.several_gateways import Text
from tests.e2e.test_adapters import Adapted
from tests.e2e.test_metrics import Scraped, value
from tests.e2e.test_remote_workers import PROMPT, Pool
from tests.error_details import info_of
from tests.gateway_process import GatewayProcess
from tests.ports import free_address
from tests.postgres_server import PostgresServer
from tests.service.test_leases import expire
from workers.common.protocol import GATEWAY_NAME

FLAGS = ("--kv-pages", "256", "--orphan-grace-s", "60", "--shards", "2")


@contextlib.contextmanager
def shared_pool(
    place: Path, workers: int = 2
) -> Iterator[tuple[Pool, Callable[[], list[str]], PostgresServer]]:
    """Workers and a journal, and what makes the flags of a gateway that shares them; of three at most."""
    pool = Pool(place)
    ports = [free_address() for _ in range(3)]
    unused = ports[:]
    with PostgresServer() as database:
        for _ in range(workers):
            pool.start_worker("--gateway", ",".join(ports))

        def own() -> list[str]:
            flags = [*FLAGS, "--pool", str(pool.certificates), "--journal", database.url]
            flags += ["--workers", str(workers), "--pool-listen", unused.pop(0)]
            return [*flags, "--peer-listen", free_address()]

        try:
            yield pool, own, database
        finally:
            pool.stop()


def refusal_of(address: str, certificates: Path, role: str) -> str:
    """Why a call to the port for gateways is refused that has no secret, but the certificate of a role."""
    ca, key, certificate = (
        (certificates / name).read_bytes() for name in ("ca.pem", f"{role}-key.pem", f"{role}.pem")
    )
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    name = (("grpc.ssl_target_name_override", GATEWAY_NAME),)
    with grpc.secure_channel(address, credentials, options=name) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ListCaches(pb.ListCachesRequest(), metadata=((HOP, "guessed"),), timeout=30)
    return info_of(refused.value).reason


def decoded_by_a_client(client: Client, found: list[int], event: threading.Event, further: int) -> None:
    """The same with the client, which finds a gateway by itself."""
    cache = client.prefill(PROMPT)
    while not event.is_set() or further > 0:
        further -= event.is_set()
        found.append(cache.decode(found[-1] if found else PROMPT[-1]).token_id)


def test_another_gateway_takes_over_with_all_tokens_and_the_kv(tmp_path: Path) -> None:
    with shared_pool(tmp_path) as (pool, own, _):
        peers: list[str] = []

        def new() -> GatewayProcess:
            flags = own()
            peers.append(flags[-1])
            # For the client, which gets the addresses of both.
            flags += ["--listen", (address := free_address()), "--advertise", address]
            flags += ["--metrics-listen", "127.0.0.1:0"]
            return GatewayProcess(model="paged-attention", workers=1, flags=flags)

        # The first one takes both shards, and leaves one to the second.
        with new() as first, new() as second:
            texts = [Text(gateway.stub, PROMPT) for gateway in (first, second)]
            assert {text.cache_id[:4] for text in texts} == {"kv0_", "kv1_"}
            was_killed = threading.Event()
            threads = [
                threading.Thread(target=text.decode_until, args=(first.stub, was_killed, 20))
                for text in texts
            ]
            client = Client([second.address, first.address], timeout_s=60)
            # Its new caches take turns, so one of two is the killed gateway's.
            by_client: list[list[int]] = [[], []]
            threads += [
                threading.Thread(target=decoded_by_a_client, args=(client, found, was_killed, 20))
                for found in by_client
            ]
            for thread in threads:
                thread.start()
            first.wait_until(
                lambda: all(len(text.tokens) > 20 for text in texts) and all(map(len, by_client))
            )
            second.process.send_signal(signal.SIGKILL)
            was_killed.set()
            for thread in threads:
                thread.join()
            client.close()
            for role in ("gateway", "worker"):
                assert refusal_of(peers[0], pool.certificates, role) == "NOT_A_GATEWAY"
            for text in texts:
                # Of one of them the gateway has the cache in a shard that is not its first.
                text.generate(first.connect(), 5)
                fork = pb.ForkCacheRequest(cache_id=text.cache_id, count=1, request_id=f"of {text.cache_id}")
                first.stub.ForkCache(fork, timeout=60)
                release = pb.ReleaseCacheRequest(request_ids=[fork.request_id])
                assert first.stub.ReleaseCache(release, timeout=60).released
            ready = [one.worker_id for one in first.status().workers if one.counts.steps]
            assert sorted(ready) == ["worker-0", "worker-1"], "also that of the shard that was taken over"
            assert first.status().caches >= 4
            shown = Scraped(first).samples()
            assert [value(shown, "quire_worker_ready", worker=worker) for worker in "01"] == [1, 1]
            assert all(value(shown, "quire_worker_starts_total", worker=worker) for worker in "01")
            assert value(shown, "quire_caches") >= 4
            with new() as third:
                for text in texts:
                    text.decode(third.stub, 10)
                # It gives both to the third one, as in a rolling upgrade.
                assert first.stop() == 0
                for text in texts:
                    text.decode(third.stub, 10)
        for text in texts:
            text.assert_as_undisturbed()
            assert text.replayed == 0, "the workers have kept their KV"
        for tokens in by_client:
            assert tokens == undisturbed.greedy([*PROMPT, PROMPT[-1]], len(tokens))


def test_the_next_owner_of_a_shard_has_the_adapters_of_its_caches(tmp_path: Path) -> None:
    """Before, it numbered them anew, and the caches that it recovered had lost theirs."""
    adapted = Adapted(tmp_path / "adapted", 2)
    adapters = tmp_path / "adapters"
    for index, directory in enumerate(adapted.adapters):
        shutil.copytree(directory, adapters / f"a{index}")
    with shared_pool(tmp_path, workers=1) as (_, own, database):
        flags = ["--shards", "1", "--adapters", str(adapters), "--dtype", "float32"]

        def new() -> GatewayProcess:
            return GatewayProcess(model=str(adapted.model), workers=1, flags=[*own(), *flags])

        with new() as first:
            first.wait_until_ready()
            texts = [AdaptedText(first, f"a{index}") for index in range(2)]
            for text in texts:
                text.decode(3)
            first.kill()
        # How long others wait for it: the test above.
        asyncio.run(expire(database))
        # Of another host, with files of its own.
        for index in (1, 0):
            shutil.rmtree(adapters / f"a{index}")
            shutil.copytree(adapted.adapters[index], adapters / f"a{index}")
        with new() as second:
            second.wait_until_ready()
            for text in texts:
                text.gateway = second
            texts += [AdaptedText(second, f"a{index}") for index in range(2)]
            assert [text.finish() for text in texts] == adapted.tokens[1:] * 2
