"""Which of several gateways a client calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from quire import AsyncClient, Client, _methods
from quire._attempts import Attempts
from quire._gateways import Gateways, targets_of
from quire.errors import Cancelled, InternalError
from quire.v1 import executor_pb2 as pb
from quire.v1 import types_pb2

from tests.fake_executor import FakeExecutor, serving

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


class HasSessions(FakeExecutor):
    """Counts them."""

    def Session(self, requests: Any, context: Any) -> Iterator[pb.SessionResponse]:
        self.calls["Session"].append(None)
        for _ in requests:
            pass
        yield from ()


async def test_sessions_and_executions_take_turns() -> None:
    """Before, all of a client went to one gateway."""
    both = HasSessions(), HasSessions()
    with serving(both[0]) as one, serving(both[1]) as other:
        with Client([one, other], timeout_s=60) as client:
            for _ in range(4):
                list(client.execute([[1]], max_tokens=1))
            for _ in range(4):
                client.session().close()
        async with AsyncClient([one, other], timeout_s=60) as awaiting:
            for _ in range(4):
                assert [chunk async for chunk in awaiting.execute([[1]], max_tokens=1)]
    assert [len(each.calls["Execute"]) for each in both] == [4, 4]
    assert [len(each.calls["Session"]) for each in both] == [2, 2]


def test_the_turn_of_a_gateway_that_is_away_is_not_the_next_one_either() -> None:
    gateways = Gateways([ONE, OTHER])
    for _ in range(4):
        away = gateways.next()
        gateways.failed(away)
        assert gateways.next() != away
        # Of one that has been asked for the sake of its cache.
        gateways.failed(gateways._targets[gateways._turn % 2])
        assert gateways.next() != away


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


def away() -> pb.BatchDecodeResponse:
    answer = pb.BatchDecodeResponse()
    answer.results.add(response=pb.DecodeResponse())
    answer.results.add().error.code = grpc.StatusCode.UNAVAILABLE.value[0]
    return answer


def test_a_batch_is_repeated_while_the_gateway_of_an_item_is_away() -> None:
    """Before, the item failed, in each rolling upgrade."""
    batch = pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id="kv0_a", position=3)])
    attempts = Attempts(_methods.BATCH_DECODE, batch, 60, several=True)
    assert attempts.failed_item(pb.BatchDecodeResponse(results=away().results[:1])) is None
    tries = 1
    while (failed := attempts.failed_item(away())) is not None:
        attempts.backoff_s(failed)
        tries += 1
    assert tries == 16, "then the caller gets what the other items have answered"
    assert Attempts(_methods.BATCH_DECODE, batch, 1, several=True).failed_item(away()) is None, "no time"
    batch.items[0].ClearField("position")
    assert Attempts(_methods.BATCH_DECODE, batch, 60, several=True).failed_item(away()) is None, "not safe"


class ReachesItLater(FakeExecutor):
    """A gateway that reaches another one at the second attempt."""

    asked = 0

    def BatchDecode(self, request: Any, context: Any) -> pb.BatchDecodeResponse:
        self.asked += 1
        return away() if self.asked == 1 else pb.BatchDecodeResponse(results=2 * away().results[:1])


def test_a_batch_is_repeated_also_where_all_gateways_have_one_address() -> None:
    """Before, it was where the client was given several."""
    batch = pb.BatchDecodeRequest(items=[pb.DecodeRequest(cache_id=f"kv{n}_a", position=3) for n in range(2)])
    executor = ReachesItLater()
    with serving(executor) as address, Client(address, timeout_s=60) as client:
        results = client._call(_methods.BATCH_DECODE, batch).results
    assert executor.asked == 2 and not any(one.HasField("error") for one in results)


def test_what_grpc_drops_is_repeated_and_what_the_server_cancels_is_not() -> None:
    """A gateway that stops drops calls that it has not read yet. Before, they failed."""
    decode = pb.DecodeRequest(cache_id="kv0_a", position=3)
    attempts = Attempts(_methods.DECODE, decode, 60, several=True)
    assert attempts.backoff_s(Cancelled(grpc.StatusCode.CANCELLED, "", "CANCELLED")) < 1
    # A proxy breaks the call off.
    assert attempts.backoff_s(InternalError(grpc.StatusCode.INTERNAL, "", "RST_STREAM")) < 1
    with pytest.raises(InternalError):
        attempts.backoff_s(InternalError(grpc.StatusCode.INTERNAL, "INTERNAL", "a bug"))
    with pytest.raises(Cancelled):
        attempts.backoff_s(Cancelled(grpc.StatusCode.CANCELLED, "CANCELLED", "by its caller"))


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
