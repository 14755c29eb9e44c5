"""Which of several gateways a client calls."""

from __future__ import annotations

import pytest
from quire._gateways import Gateways, targets_of
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

ONE, OTHER = "one:1", "other:1"


def created(cache_id: str) -> pb.PrefillResponse:
    return pb.PrefillResponse(kv_cache=types_pb2.KvCacheHandle(cache_id=cache_id))


def test_new_caches_take_turns_and_calls_go_where_their_cache_is() -> None:
    gateways = Gateways([ONE, OTHER])
    homes = {}
    for shard in range(2):
        target = gateways.target(pb.PrefillRequest())
        homes[target] = shard
        gateways.answered(target, pb.PrefillRequest(), created(f"kv{shard}_a"), ())
    assert homes.keys() == {ONE, OTHER}
    for target, shard in homes.items():
        assert gateways.target(pb.DecodeRequest(cache_id=f"kv{shard}_b")) == target
        batch = pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id=f"kv{shard}_b")])
        assert gateways.target(batch) == target


def test_it_learns_from_forwarded_answers_and_from_failures() -> None:
    gateways, decode = Gateways([ONE, OTHER]), pb.DecodeRequest(cache_id="kv7_a")
    gateways.answered(ONE, decode, pb.DecodeResponse(), (("quire-gateway", OTHER),))
    assert gateways.target(decode) == OTHER
    gateways.failed(OTHER)
    asked = {gateways.target(decode)}
    gateways.failed(asked.copy().pop())
    asked.add(gateways.target(decode))
    assert asked == {ONE, OTHER}, "each attempt goes to another one"
    gateways.answered(ONE, decode, pb.DecodeResponse(), (("quire-gateway", "evil:1"),))
    assert gateways.target(decode) in (ONE, OTHER), "an address that was not given gets no token"


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("a:1,b:2", ["a:1", "b:2"]),
        (["a:1", "b:2"], ["a:1", "b:2"]),
        ("a:1", ["a:1"]),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", ["ipv4:127.0.0.1:1,127.0.0.1:2"]),
        ("unix:/a,b", ["unix:/a,b"]),
    ],
)
def test_targets(target: str | list[str], found: list[str]) -> None:
    assert targets_of(target) == found
