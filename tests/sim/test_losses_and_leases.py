"""What callers see when a worker dies or a lease runs out, one example each."""

from __future__ import annotations

import pytest

from service.caches.requests import Fork, Handles, Release, Released, Renew, Truncate
from service.caches.table import Limits
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.model_worker import KV_MISSING


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(Limits(default_lease_s=10.0, max_lease_s=100.0))


# Workers die.


def test_an_append_under_way_ends_with_its_worker(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    append, creation = gateway.ask(decode(cache, 3)), gateway.ask(prefill(5))
    gateway.lose_worker()
    assert gateway.reason(append) == "CACHE_LOST", "there was a cache, and it is gone"
    assert gateway.reason(creation) == "WORKER_LOST", "there was none: trying again helps"
    assert gateway.tokens(cache) == [1, 2]


def test_without_a_worker_nothing_can_be_created(gateway: Gateway) -> None:
    gateway.lose_worker()
    assert gateway.refusal(prefill(1)).reason == "NO_WORKER"
    gateway.start_worker("worker-0")
    gateway.create(1)


def test_a_lost_cache_says_so_until_it_is_released(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.lose_worker()
    gateway.start_worker("worker-0")
    for request in (decode(cache, 3), Truncate(cache, 1), Fork(cache, 1)):
        error = gateway.refusal(request)
        assert error.reason == "CACHE_LOST" and error.metadata == {"seq_len": "2"}
    assert gateway.release(cache)
    assert gateway.refusal(decode(cache, 3)).reason == "CACHE_NOT_FOUND"


def test_a_release_behind_an_append_survives_its_worker(gateway: Gateway) -> None:
    """It needs no KV, and what waits behind it finds the cache released, not lost."""
    cache = gateway.create(1, 2)
    append, renewal, release, late, again = gateway.submit(
        decode(cache, 3), Renew(cache), Release(cache), decode(cache, 4), Release(cache)
    )
    gateway.lose_worker()
    assert gateway.reason(append) == "CACHE_LOST"
    assert isinstance(gateway.replies[renewal], Handles), "a lost cache may be kept, to be released later"
    assert gateway.replies[release] == Released(released=True)
    assert gateway.reason(late) == "CACHE_NOT_FOUND"
    assert gateway.replies[again] == Released(released=False)
    assert len(gateway.table) == len(gateway.journal) == gateway.table.operations_in_flight == 0


def test_an_answer_in_memory_survives_the_worker(gateway: Gateway) -> None:
    """It was applied: to say that it was not would be untrue."""
    cache = gateway.create(1, 2)
    first = gateway.append(decode(cache, 3, position=2))
    gateway.lose_worker()
    assert gateway.append(decode(cache, 3, position=2)) == first
    assert gateway.refusal(decode(cache, 4, position=3)).reason == "CACHE_LOST"


def test_a_repeated_creation_replaces_a_lost_cache(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, request_id="a")
    gateway.lose_worker()
    gateway.start_worker("worker-0")
    assert gateway.create(1, 2, request_id="a") != cache


def test_a_fenced_worker_is_not_heard(gateway: Gateway) -> None:
    cache = gateway.create(1)
    worker = gateway.worker
    gateway.ask(decode(cache, 2))
    worker.take(1)
    worker.step(all_jobs=True)
    gateway.lose_worker()
    gateway.start_worker("worker-0")
    gateway.dispatcher.worker_lost("worker-0", worker.epoch)
    gateway.deliver(worker)
    assert gateway.tokens(cache) == [1]
    gateway.create(5)


def test_missing_kv_is_a_loss_of_that_cache_only(gateway: Gateway) -> None:
    cache, other = gateway.create(1, 2), gateway.create(5)
    first, waiting = gateway.ask(decode(cache, 3)), gateway.ask(decode(cache, 4))
    gateway.refuse(first, KV_MISSING)
    assert gateway.reason(first) == gateway.reason(waiting) == "CACHE_LOST"
    gateway.append(decode(other, 6))
    assert gateway.release(cache)
    gateway.work()
    assert gateway.held() == [[5, 6]]


# Leases.


def test_an_idle_cache_is_released_when_its_lease_runs_out(gateway: Gateway) -> None:
    gateway.create(1, lease_s=5.0)
    gateway.now_s = 4.9
    assert gateway.dispatcher.expire() == 0
    gateway.now_s = 5.0
    assert gateway.dispatcher.expire() == 1
    gateway.work()
    assert len(gateway.table) == len(gateway.journal) == len(gateway.held()) == 0


def test_use_and_renewal_start_the_lease_anew(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.now_s = 9.0
    handle = gateway.append(decode(cache, 2)).handle
    assert handle is not None and handle.expires_at_s == 19.0
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


def test_a_copys_lease_starts_when_its_caller_learns_of_it(gateway: Gateway) -> None:
    cache = gateway.create(1)
    ticket = gateway.ask(Fork(cache, 1))
    gateway.now_s = 1000.0
    gateway.work()
    assert ticket in gateway.replies
    assert gateway.dispatcher.expire() == 0
    assert [handle.expires_at_s for _, handle in gateway.table.handles()] == [1010.0, 1010.0]
