"""What callers see when a worker dies or a lease runs out, one example each."""

from __future__ import annotations

import pytest

from service.caches.requests import Fork, Renew, Truncate
from service.caches.reservations import Limits
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.model_worker import KV_MISSING


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(Limits(default_lease_s=10.0, max_lease_s=100.0))


# Workers die.


def test_without_any_worker_ever_nothing_can_be_created() -> None:
    gateway = Gateway(workers=0)
    assert gateway.refusal(prefill(1)).reason == "NO_WORKER"
    gateway.start_worker("worker-0")
    gateway.create(1)


def test_a_cache_without_a_worker_is_cut_forked_and_released(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.lose_worker()
    (child,) = gateway.handles(Fork.of(cache, 1)).handles
    gateway.handles(Truncate(cache, 1))
    assert gateway.tokens(cache) == [1] and gateway.tokens(child.cache_id) == [1, 2]
    assert gateway.release(cache)
    assert gateway.refusal(decode(cache, 3)).reason == "CACHE_NOT_FOUND"


def test_an_answer_in_memory_needs_no_worker(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    first = gateway.append(decode(cache, 3, position=2))
    gateway.lose_worker()
    again = gateway.append(decode(cache, 3, position=2))
    assert again.answer == first.answer and again.kept == first.kept


def test_a_repeated_creation_finds_its_cache_after_a_loss(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, request_id="a")
    gateway.lose_worker()
    gateway.start_worker("worker-0")
    assert gateway.create(1, 2, request_id="a") == cache


def test_missing_kv_is_computed_again(gateway: Gateway) -> None:
    cache, other = gateway.create(1, 2), gateway.create(5)
    first = gateway.ask(decode(cache, 3))
    gateway.worker.inbox.clear()
    gateway.refuse(gateway.sent[-1].op_id, KV_MISSING)
    gateway.append(decode(other, 6))
    assert first in gateway.replies and gateway.tokens(cache) == [1, 2, 3]
    assert sorted(gateway.held()) == [[1, 2, 3], [5, 6]]


# Leases.


def test_an_idle_cache_is_released_when_its_lease_runs_out(gateway: Gateway) -> None:
    gateway.create(1, lease_s=5.0)
    gateway.now_s = 4.9
    assert gateway.dispatcher.expire() == 0
    gateway.now_s = 5.0
    assert gateway.dispatcher.expire() == 1
    gateway.work()
    assert len(gateway.machine) == len(gateway.held()) == 0


def test_use_and_renewal_start_the_lease_anew(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.now_s = 9.0
    handle = gateway.append(decode(cache, 2))
    assert handle.expires_at_s == 19.0
    gateway.now_s = 10.0
    assert renewed(gateway, cache, 50.0) == 60.0
    gateway.now_s = 11.0
    assert renewed(gateway, cache) == 61.0
    assert renewed(gateway, cache, 1e9) == 111.0, "the server's maximum"
    assert gateway.refusal(Renew("unknown")).reason == "CACHE_NOT_FOUND"


def renewed(gateway: Gateway, cache: str, lease_s: float | None = None) -> float:
    """Until when a cache lives now."""
    (handle,) = gateway.handles(Renew(cache, lease_s)).handles
    return handle.expires_at_s


def test_a_cache_in_use_does_not_expire(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.ask(decode(cache, 2))
    gateway.now_s = 1000.0
    assert gateway.dispatcher.expire() == 0
    gateway.work()
    assert gateway.dispatcher.expire() == 0, "just used"


def test_a_copys_lease_starts_with_it(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.now_s = 5.0
    (child,) = gateway.handles(Fork.of(cache, 1)).handles
    assert child.expires_at_s == 15.0
