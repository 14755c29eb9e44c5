"""What belongs to a tenant: caches, request ids, prefixes; and how much of it may be had."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from service.caches.admission import Limits
from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Fork,
    Handles,
    Release,
    Released,
    Renew,
    Request,
    Truncate,
)
from service.caches.tenants import Quota, Tenant
from service.dispatcher import Outcome
from service.errors import (
    CacheNotFound,
    GatewayUnavailable,
    InvalidArgument,
    PositionMismatch,
    QueueFull,
    QuotaExceeded,
    ShardMoved,
)
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.invariants import check_invariants


class Shared(Gateway):
    """A gateway whose callers say who they are."""

    def ask_as(self, tenant: Tenant | None, *requests: Request) -> list[Outcome]:
        """The outcomes of requests that come together."""
        outcomes: dict[int, Outcome] = {}
        self.dispatcher.start(requests, outcomes.update, 1, tenant)
        self.work()
        check_invariants(self.machine)
        return [outcomes[index] for index in range(len(requests))]

    def make(self, tenant: Tenant | None, *token_ids: int, request_id: str = "") -> str:
        (made,) = self.ask_as(tenant, prefill(*token_ids, request_id=request_id))
        assert isinstance(made, Appended), made
        return made.cache_id


@pytest.fixture
def gateway() -> Shared:
    return Shared()


@pytest.mark.parametrize("stranger", [Tenant("mallory"), None], ids=["tenant", "anonymous"])
def test_a_strangers_cache_does_not_exist(gateway: Shared, stranger: Tenant | None) -> None:
    alice = Tenant("alice")
    cache = gateway.make(alice, 1, 2)
    asks: list[Callable[[str], Request]] = [
        lambda name: decode(name, 3),
        lambda name: Append(kind=AppendKind.PREFILL, cache_id=name, token_ids=[3]),
        lambda name: Append(kind=AppendKind.VERIFY, cache_id=name, token_ids=[3, 4], rows=2),
        lambda name: Fork.of(name, 1),
        lambda name: Truncate(name, 1),
        Renew,
    ]
    for ask in asks:
        for answer, unknown in zip(
            gateway.ask_as(stranger, ask(cache)), gateway.ask_as(stranger, ask("kv_unknown")), strict=True
        ):
            assert isinstance(answer, CacheNotFound) and isinstance(unknown, CacheNotFound)
            assert answer.message == unknown.message, "whether it exists is not told either"
    assert gateway.ask_as(stranger, Release(cache)) == [Released(released=False)]
    assert list(gateway.machine.index.handles(tenant=stranger)) == []
    assert [handle.seq_len for _, handle in gateway.machine.index.handles(tenant=alice)] == [2]


def test_a_fork_releases_nothing_of_others(gateway: Shared) -> None:
    alice, mallory = Tenant("alice"), Tenant("mallory")
    cache, own = gateway.make(alice, 1), gateway.make(mallory, 1)
    (forked,) = gateway.ask_as(mallory, Fork.of(own, 1, (cache, own)))
    assert isinstance(forked, Handles)
    assert [handle.cache_id for _, handle in gateway.machine.index.handles(tenant=alice)] == [cache]
    assert [handle.cache_id for _, handle in gateway.machine.index.handles(tenant=mallory)] == [
        handle.cache_id for handle in forked.handles
    ]


def test_a_request_id_is_the_tenants_own(gateway: Shared) -> None:
    alice, mallory = Tenant("alice"), Tenant("mallory")
    cache = gateway.make(alice, 1, 2, request_id="r")
    assert gateway.make(alice, 1, 2, request_id="r") == cache
    assert gateway.make(mallory, 1, 2, request_id="r") != cache
    assert gateway.make(None, 1, 2, request_id="r") != cache
    assert gateway.ask_as(alice, Release(cache)) == [Released(released=True)]
    assert len(list(gateway.machine.index.handles(tenant=mallory))) == 1


def test_each_tenant_and_each_cache_salt_has_a_salt_of_its_own(gateway: Shared) -> None:
    names = ("", "a", "ab", "1:a")
    salts = {Tenant(name).salt(cache_salt) for name in names for cache_salt in ("", "b", "bc", ":")}
    assert len(salts) == 4 * 4
    assert Tenant("").salt("") == b""

    alice = Tenant("alice")
    cache = gateway.make(alice, *range(1, 20))
    gateway.ask_as(alice, decode(cache, 5), Append(AppendKind.PREFILL, "", [1], cache_salt="s"))
    forwards = [sent.forward for sent in gateway.sent if sent.WhichOneof("command") == "forward"]
    assert [forward.salt for forward in forwards] == [alice.salt(""), b"", alice.salt("s")]


def test_a_fork_of_nothing_keeps_the_salt(gateway: Shared) -> None:
    alice = Tenant("alice")
    (made,) = gateway.ask_as(alice, Append(AppendKind.PREFILL, "", [1], cache_salt="s"))
    assert isinstance(made, Appended)
    gateway.ask_as(alice, Truncate(made.cache_id, 0))
    (forked,) = gateway.ask_as(alice, Fork.of(made.cache_id, 1))
    assert isinstance(forked, Handles)
    gateway.ask_as(alice, decode(forked.handles[0].cache_id, 1))
    assert gateway.sent[-1].forward.salt == alice.salt("s")


# Quotas.


def refused(outcome: Outcome) -> tuple[str, float | None]:
    assert isinstance(outcome, QuotaExceeded), outcome
    return outcome.metadata["quota"], outcome.retry_after_s


def test_a_tenant_has_so_many_caches_and_others_have_theirs(gateway: Shared) -> None:
    alice = Tenant("alice", Quota(max_caches=2))
    cache = gateway.make(alice, 1, request_id="r")
    gateway.make(alice, 2)
    assert [refused(o) for o in gateway.ask_as(alice, prefill(3), Fork.of(cache, 1))] == [
        ("max_caches", None)
    ] * 2
    assert gateway.make(alice, 1, request_id="r") == cache, "a repetition makes none"
    gateway.make(Tenant("bob"), 3)
    gateway.ask_as(alice, Release(cache))
    gateway.make(alice, 3)


def test_a_tenant_has_so_many_tokens(gateway: Shared) -> None:
    alice = Tenant("alice", Quota(max_tokens=10))
    cache = gateway.make(alice, *range(6))
    (copied,) = gateway.ask_as(alice, Fork.of(cache, 1))
    assert refused(copied) == ("max_tokens", None)
    long, short = gateway.ask_as(alice, prefill(*range(5)), prefill(*range(4)))
    assert refused(long) == ("max_tokens", None) and isinstance(short, Appended)
    appended = decode(cache, 1, position=6)
    assert refused(gateway.ask_as(alice, appended)[0]) == ("max_tokens", None)
    gateway.ask_as(alice, Truncate(cache, 5))
    (grown,) = gateway.ask_as(alice, decode(cache, 1, position=5))
    assert isinstance(grown, Appended) and alice.tokens == 10
    assert isinstance(gateway.ask_as(alice, decode(cache, 1, position=5))[0], Appended), "a repetition"
    assert isinstance(gateway.ask_as(alice, decode(cache, 9, position=9))[0], PositionMismatch)
    gateway.ask_as(
        alice, *(Release(handle.cache_id) for _, handle in list(gateway.machine.index.handles(tenant=alice)))
    )
    assert (alice.caches, alice.tokens, alice.in_flight) == (0, 0, 0)


def test_what_is_under_way_counts(gateway: Shared) -> None:
    alice = Tenant("alice", Quota(max_tokens=10, max_in_flight=3))
    outcomes = gateway.ask_as(alice, *(prefill(*range(4)) for _ in range(4)))
    assert [type(outcome) for outcome in outcomes[:2]] == [Appended, Appended]
    assert refused(outcomes[2]) == ("max_tokens", None), "four more would be twelve"
    alice.quota = Quota(max_in_flight=3)
    outcomes = gateway.ask_as(alice, *(prefill(n) for n in range(5)))
    assert [isinstance(outcome, Appended) for outcome in outcomes] == [True] * 3 + [False] * 2
    quota, retry_s = refused(outcomes[4])
    assert quota == "max_in_flight" and retry_s


def test_a_tenant_asks_so_often(gateway: Shared) -> None:
    alice = Tenant("alice", Quota(max_per_s=2))
    cache = gateway.make(alice, 1)
    second, third = gateway.ask_as(alice, decode(cache, 1), decode(cache, 1))
    assert isinstance(second, Appended)
    assert refused(third) == ("max_per_s", 0.5)
    gateway.now_s += 0.5
    assert isinstance(gateway.ask_as(alice, decode(cache, 2))[0], Appended)
    assert refused(gateway.ask_as(alice, decode(cache, 3))[0]) == ("max_per_s", 0.5)
    alice.quota = Quota(max_per_s=4)
    gateway.now_s += 0.25
    assert isinstance(gateway.ask_as(alice, decode(cache, 3))[0], Appended), "another rate holds at once"
    assert refused(gateway.ask_as(alice, decode(cache, 4))[0]) == ("max_per_s", 0.25)
    assert gateway.ask_as(alice, Release(cache)) == [Released(released=True)], "what frees is always let in"


def test_a_tenant_holds_nothing_of_a_shard_that_another_gateway_has(gateway: Shared) -> None:
    """Before, its caches were counted for ever where it was given back, and calls for it not answered."""
    alice = Tenant("alice")
    kept, other = gateway.make(alice, 1, 2), gateway.make(alice, 3)
    gateway.disk.is_slow = True
    found: list[tuple[int, Outcome]] = []
    gateway.dispatcher.start([Release(other)], found.extend, 1, alice)
    requests: list[Request] = [
        prefill(1, 2, 3),
        decode(kept, 3),
        decode(kept, 4),
        Fork.of(kept, 3),
        Append(AppendKind.SCORE, "", [1]),
    ]
    gateway.dispatcher.start(requests, found.extend, 1, alice)
    assert (alice.caches, alice.in_flight, found) == (4, 6, [])
    gateway.dispatcher.close(ShardMoved)
    assert (alice.caches, alice.tokens, alice.in_flight) == (0, 0, 0)
    # The release is with the journal: nobody here knows what became of it.
    reasons = [type(outcome) for _, outcome in found]
    assert reasons.count(GatewayUnavailable) == 1 and reasons.count(ShardMoved) == 5


@pytest.mark.parametrize("name", ["alice", ""])
@pytest.mark.parametrize("adapter", [0, 7])
def test_a_repeated_creation_has_the_salt_of_the_first(gateway: Shared, adapter: int, name: str) -> None:
    """Else a caller would get a cache whose pages are shared with callers from whom it is kept apart."""
    tenant = Tenant(name) if name else None
    asked = replace(prefill(1, 2, request_id="r"), adapter=adapter, cache_salt="of the first")
    (made,) = gateway.ask_as(tenant, asked)
    (again,) = gateway.ask_as(tenant, asked)
    assert isinstance(made, Appended) and isinstance(again, Appended) and made.cache_id == again.cache_id
    for other in ("", "another", "of the first "):
        (refused,) = gateway.ask_as(tenant, replace(asked, cache_salt=other))
        assert isinstance(refused, InvalidArgument) and refused.reason == "REQUEST_ID_REUSED", other


def test_a_tenant_has_half_of_the_queue() -> None:
    """Whatever one tenant sends, others are admitted; without tenants callers cannot be told apart."""
    gateway = Shared(Limits(max_queued_operations=6))
    outcomes = gateway.ask_as(Tenant("alice"), *(prefill(n) for n in range(5)))
    assert [type(outcome) for outcome in outcomes] == [Appended] * 3 + [QueueFull] * 2
    refused = outcomes[3]
    assert isinstance(refused, QueueFull) and refused.metadata == {"limit": "3"}
    assert [type(outcome) for outcome in gateway.ask_as(None, *(prefill(n) for n in range(7)))] == (
        [Appended] * 6 + [QueueFull]
    )
