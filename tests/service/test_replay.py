"""Caches outlive their KV: what a worker loses, or has to give up, is computed again when it is needed."""

from __future__ import annotations

import pytest

from service.caches.requests import Append, Appended, Handle, Truncate
from service.errors import QuireError
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.model_worker import Pool

# As long as nobody may take a cache's pages that is in use.
IDLE_S = 0.3


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def handle_of(gateway: Gateway, cache: str) -> Handle:
    return next(handle for _, handle in gateway.machine.index.handles() if handle.cache_id == cache)


# Workers die.


def test_what_nobody_used_lately_is_computed_again_when_it_is_used() -> None:
    gateway = Gateway(workers=2)
    cache = gateway.create(1, 2, 3)
    worker_id = handle_of(gateway, cache).worker_id
    gateway.now_s += 1000.0
    gateway.lose_worker(worker_id)
    gateway.work()
    gone = handle_of(gateway, cache)
    assert (gone.worker_id, gone.seq_len) == ("", 3) and gateway.held() == []
    result = gateway.append(decode(cache, 4))
    assert result.replayed_tokens == 3
    assert gateway.append(decode(cache, 5)).replayed_tokens == 0


def test_what_is_read_from_disk_or_shared_is_not_computed_again(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    gateway.lose_worker()
    worker = gateway.start_worker("worker-0")
    ticket = gateway.ask(decode(cache, 4))
    worker.work()
    worker.outbox[0].forward.reused_tokens = 2
    gateway.deliver(worker)
    gateway.work()
    answer = gateway.replies[ticket]
    assert isinstance(answer, Appended) and answer.replayed_tokens == 1
    assert gateway.machine.parts.context.counts["replayed_tokens"] == 1


def test_who_waits_for_a_worker_is_told_before_his_deadline(gateway: Gateway) -> None:
    gateway.lose_worker()
    ticket = gateway.ask(Append(prefill().kind, "", (1,), timeout_s=2.0))
    gateway.wait(1.8)
    assert ticket not in gateway.replies
    gateway.wait(0.15)
    refused = gateway.replies[ticket]
    assert isinstance(refused, QuireError) and refused.reason == "NO_WORKER" and refused.retry_after_s


def test_a_worker_that_is_drained_gives_its_caches_away() -> None:
    gateway = Gateway(workers=2)
    cache = gateway.create(1, 2, 3)
    before = handle_of(gateway, cache)
    ticket = gateway.ask(decode(cache, 4))
    worker = gateway.workers[before.worker_id]
    gateway.dispatcher.worker_draining(worker.worker_id, worker.epoch)
    assert not gateway.machine.is_drained(worker.worker_id, worker.epoch), "what has begun is finished"
    gateway.work()
    assert gateway.machine.is_drained(worker.worker_id, worker.epoch)
    assert isinstance(gateway.replies[ticket], Appended) and not worker.sequences
    after = gateway.append(decode(cache, 5))
    assert after.worker_id != before.worker_id


# Pages run out.


def small(pages: int, **rest: object) -> Gateway:
    """Of one worker with so many pages, of 4 tokens each."""
    return Gateway(pool=Pool(pages, page_tokens=4), **rest)  # type: ignore[arg-type]


def test_it_is_the_cache_that_was_used_longest_ago_that_goes() -> None:
    gateway = small(3)
    caches = [gateway.create(n) for n in range(3)]
    gateway.now_s += IDLE_S
    gateway.append(decode(caches[0], 7))
    gateway.now_s += IDLE_S
    gateway.create(9)
    assert [handle_of(gateway, cache).worker_id for cache in caches] == ["worker-0", "", "worker-0"]


def test_a_cache_in_use_keeps_its_pages_and_who_needs_them_is_told_in_time() -> None:
    gateway = small(2)
    running = gateway.create(1, 2, 3, 4)
    ticket = gateway.ask(Append(prefill().kind, "", tuple(range(8)), timeout_s=2.0))
    gateway.work()
    for _ in range(20):
        gateway.handles(Truncate(running, 3))
        gateway.append(decode(running, 4))
        gateway.wait(0.09)
    assert ticket not in gateway.replies
    gateway.wait(0.15)
    refused = gateway.replies[ticket]
    assert isinstance(refused, QuireError) and refused.reason == "KV_EXHAUSTED" and refused.retry_after_s
    assert refused.metadata == {"pages_needed": "2", "pages_available": "1"}


def test_a_silent_worker_has_no_room_to_offer() -> None:
    """It is not chosen while another one is heard, so nobody gives up his place for it."""
    gateway = Gateway(workers=2, pool=Pool(2, page_tokens=4))
    gateway.dispatcher.worker_suspected("worker-1", 2, suspect=True)
    running = gateway.create(1, 2, 3, 4)
    ticket = gateway.ask(prefill(*range(8)))
    gateway.work()
    for _ in range(3):
        gateway.append(decode(running, 4))
        gateway.handles(Truncate(running, 4))
        gateway.wait(0.09)
    asked = [sent.op_id for sent in gateway.sent if len(sent.forward.token_ids) == 8]
    assert ticket not in gateway.replies and len(asked) == 1
    gateway.dispatcher.worker_suspected("worker-1", 2, suspect=False)
    gateway.release(running)
    gateway.work()
    assert isinstance(gateway.replies[ticket], Appended)


def test_caches_that_are_restored_take_nothing_from_others() -> None:
    """A loss is made up for ahead of time only where there is room."""
    gateway = Gateway(workers=2, pool=Pool(4, page_tokens=4))
    lost = gateway.create(1, 2, 3)
    home = handle_of(gateway, lost).worker_id
    others: list[str] = []
    while len(gateway.workers[next(w for w in gateway.workers if w != home)].sequences) < 4:
        others.append(gateway.create(50 + len(others)))
    gateway.now_s += IDLE_S
    there = {cache: handle_of(gateway, cache).worker_id for cache in others}
    gateway.lose_worker(home)
    gateway.work()
    for cache, worker_id in there.items():
        assert handle_of(gateway, cache).worker_id == ("" if worker_id == home else worker_id)
