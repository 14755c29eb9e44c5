"""Gateways that forward to each other, in one process: who computes what, how often, and in which order.

What they know of owners may be wrong, as after a move. The planted bug is a call that is forwarded for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from quire.v1 import executor_pb2, types_pb2
from quire.v1 import executor_pb2 as pb

from service.api.status import from_status
from service.auth.authenticator import HOP
from service.budgets import Budgets
from service.config import Config
from service.errors import DeadlinePassed, GatewayUnavailable, QuireError, SeveralShards
from service.extensions.gateways import forwarding
from service.extensions.gateways.forwarding import Forwarding
from service.extensions.gateways.peers import Addresses, Metadata, Peers
from service.shard import Shard, shard_of
from tests.service.served import until

CONFIG = Config()
# A call may be sent to one other gateway, for each of its parts.
MOST_HOPS = 1


class Loop(Exception):
    """A call went from gateway to gateway."""


class Context:
    def __init__(self, metadata: Metadata) -> None:
        self.metadata = tuple(metadata or ())

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> Metadata:
        return self.metadata

    def set_trailing_metadata(self, metadata: object) -> None:
        self.trailing = metadata

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)


class Cluster:
    """Gateways with a home shard each, and further shards of gateways that are gone."""

    def __init__(self, owners: list[int], known: list[list[int | None]]) -> None:
        """`owners`: by shard. The first shards are homes. `known`: by gateway, what it knows of owners."""
        self.owners = owners
        self.applied: Counter[str] = Counter()
        self.gateways = []
        for home, owners_known in enumerate(known):
            shard = Shard(home, len(owners))
            gateway = Gateway(self, shard, owners_known)
            self.gateways.append(gateway)
            for index, owner in enumerate(owners):
                if owner == home != index:
                    gateway.forwarding.cores[index] = gateway.as_further(index)


class Gateway:
    """Also the peers of its forwarding."""

    secret = "secret"

    def __init__(self, cluster: Cluster, shard: Shard, known: list[int | None]) -> None:
        self.cluster, self.home, self.known = cluster, shard.index, known
        peers = {index: str(owner) for index, owner in enumerate(known) if owner is not None}
        self.addresses = Addresses(peers, {index: f"public:{index}" for index in range(len(known))})
        parts = self, Budgets.of_server(CONFIG)
        self.forwarding = Forwarding(CONFIG, shard, *parts)  # type: ignore[arg-type]

    async def call(
        self, address: str, method: str, request: Any, _kind: object, _timeout_s: object, metadata: Metadata
    ) -> Any:
        hops = (*(metadata or ()), (HOP, "secret"))
        if sum(key == HOP for key, _ in hops) > MOST_HOPS:
            raise Loop
        return await self.cluster.gateways[int(address)].answer(method, request, hops)

    async def answer(self, method: str, request: Any, metadata: Metadata = ()) -> Any:
        context, here = Context(metadata), self.core(self.home)
        if not self.forwarding.must_answer(method, request):
            return await here(method, request, context)
        return await self.forwarding.answer(method, request, context, here)

    def as_further(self, shard: int) -> Any:
        return SimpleNamespace(api=SimpleNamespace(run_here=self.core(shard)))

    def core(self, shard: int) -> Any:
        """Appends, and answers with how often it has."""

        async def run(method: str, request: Any, _context: object) -> Any:
            items = request.items if method.startswith("Batch") else [request]
            response = pb.BatchDecodeResponse()
            for item in items:
                named = shard_of(item.cache_id)
                is_of_nobody = named is None or named >= len(self.cluster.owners)
                assert named == shard or (is_of_nobody and shard == self.home), "computed by its owner"
                self.cluster.applied[item.cache_id] += 1
                handle = types_pb2.KvCacheHandle(
                    cache_id=item.cache_id, seq_len=self.cluster.applied[item.cache_id]
                )
                response.results.add(response=pb.DecodeResponse(kv_cache=handle))
            await asyncio.sleep(0)
            return response if method.startswith("Batch") else response.results[0].response

        return run


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, list[str]]:
    gateways = draw(st.integers(1, 3))
    shards = draw(st.integers(max(2, gateways), 5))
    owners = [*range(gateways)] + [draw(st.integers(0, gateways - 1)) for _ in range(shards - gateways)]
    known: list[list[int | None]] = []
    for home in range(gateways):
        others: list[int | None] = [None, *(other for other in range(gateways) if other != home)]
        wrong = st.sampled_from(others)
        seen = [draw(st.one_of(st.just(owner), st.just(owner), wrong)) for owner in owners]
        # A gateway knows what it has itself. Of what it has lost it knows the owner at the time.
        known.append([home if owner == home else one for owner, one in zip(owners, seen, strict=True)])
    names = st.one_of(
        st.builds("kv{}_{}".format, st.integers(0, shards), st.integers(0, 5)), st.just("kv_old"), st.just("")
    )
    return Cluster(owners, known), draw(st.lists(names, min_size=1, max_size=8, unique=True))


def check_batch(cluster: Cluster, names: list[str]) -> None:
    """One batch by each gateway: each item once, in order, or an error with which a retry is safe."""
    for gateway in cluster.gateways:
        before = cluster.applied.copy()
        request = pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id=name) for name in names])
        results = asyncio.run(gateway.answer("BatchDecode", request)).results
        for name, result in zip(names, results, strict=True):
            if result.HasField("error"):
                assert from_status(result.error).reason in ("SHARD_MOVED", "GATEWAY_UNAVAILABLE")
                assert cluster.applied[name] == before[name]
                shard = shard_of(name)
                assert shard is not None and gateway.known[shard] != cluster.owners[shard]
            else:
                assert result.response.kv_cache.cache_id == name
                assert cluster.applied[name] == before[name] + 1


@given(clusters())
def test_each_item_is_applied_once_by_its_owner_and_answered_in_order(
    drawn: tuple[Cluster, list[str]],
) -> None:
    check_batch(*drawn)


def test_a_call_that_is_forwarded_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted bug. Two gateways each believe that the other one has the third shard."""
    cluster = Cluster([0, 1, 2], [[0, 1, 1], [0, 1, 0], [0, 1, 2]])
    check_batch(cluster, ["kv2_a", "kv1_b"])
    monkeypatch.setattr(forwarding, "is_forwarded", lambda _: False)
    with pytest.raises(ExceptionGroup) as found:
        check_batch(cluster, ["kv2_a", "kv1_b"])
    assert found.value.subgroup(Loop)


def test_what_spans_shards_is_refused_before_anything_is_done() -> None:
    cluster = Cluster([0, 1], [[0, 1], [0, 1]])
    fork = pb.ForkCacheRequest(cache_id="kv1_a", count=1, release=["kv0_b"])
    with pytest.raises(SeveralShards):
        asyncio.run(cluster.gateways[0].answer("ForkCache", fork))
    assert not cluster.applied


@pytest.mark.parametrize("token", ["x", "9.", ".", "-1.3", "1e3.", "99999999."])
def test_a_page_token_of_no_shard_is_refused(token: str) -> None:
    gateway = Cluster([0, 1], [[0, 1], [0, 1]]).gateways[0]
    request = pb.ListCachesRequest(page_token=token)
    with pytest.raises(QuireError) as refused:
        asyncio.run(gateway.forwarding.list_caches(request, Context(()), gateway.core(0)))
    assert refused.value.reason == "BAD_PAGE_TOKEN"


@given(st.integers(1, 64).flatmap(lambda count: st.tuples(st.just(count), st.integers(count, 300))))
def test_each_worker_belongs_to_one_shard_and_each_shard_has_one(drawn: tuple[int, int]) -> None:
    count, workers = drawn
    shares = [Shard(index, count).workers(workers) for index in range(count)]
    assert all(shares) and [index for share in shares for index in share] == [*range(workers)]


def test_ids_name_their_shard_and_those_of_a_single_gateway_stay_as_they_were() -> None:
    assert shard_of(Shard(12, 64).new_cache_id()) == 12
    assert Shard().new_cache_id().startswith("kv_") and shard_of(Shard().new_cache_id()) is None
    assert shard_of("kv_3_") is None and shard_of("") is None


# Connections: as many as there are gateways, however often these are replaced.

REPLACED = 5


async def test_no_connection_to_a_gateway_that_is_gone_remains(tmp_path: Path) -> None:
    """Before, each address that a gateway had ever had kept its connection."""
    addresses, connected = Addresses(), Counter[str]()
    peers = Peers(Config(), "secret", addresses)

    async def listen(path: str) -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connected[path] += 1
            # What is no gateway never answers.
            while await reader.read(1 << 16):
                pass
            connected[path] -= 1
            writer.close()

        return await asyncio.start_unix_server(serve, path)

    async def call(path: str, timeout_s: float) -> None:
        request, response = executor_pb2.GetStatusRequest(), executor_pb2.GetStatusResponse
        with pytest.raises(DeadlinePassed):
            await peers.call(f"unix:{path}", "GetStatus", request, response, timeout_s, ())

    paths = [str(tmp_path / f"{number}.sock") for number in range(REPLACED)]
    servers = [await listen(path) for path in paths]
    addresses.peers = {0: f"unix:{paths[0]}"}
    # The first one is still asked when the second has taken its place.
    slow = asyncio.create_task(call(paths[0], 1.5))
    await until(lambda: connected[paths[0]] == 1)
    for path in paths[1:]:
        addresses.peers = {0: f"unix:{path}"}
        await call(path, 0.2)
        assert connected[paths[0]] == 1, "it has a call"
    await slow
    addresses.peers = {}
    request, response = executor_pb2.GetStatusRequest(), executor_pb2.GetStatusResponse
    with pytest.raises(GatewayUnavailable):
        await peers.call(f"unix:{tmp_path}/none", "GetStatus", request, response, 5, ())
    await until(lambda: not +connected)
    await peers.close()
    for server in servers:
        server.close()
