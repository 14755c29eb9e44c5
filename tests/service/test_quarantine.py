"""A sequence that kills workers is found, and only that one is refused."""

from __future__ import annotations

import pytest

from service.caches.requests import Appended, Fork
from tests.sim.harness import Gateway, decode, prefill

DEADLY = 66


def work(gateway: Gateway, *, crashed: bool = True) -> int:
    """Workers answer; one that is to compute a deadly token dies, and comes back. Returns how many died."""
    deaths = 0
    while not all(worker.idle for worker in gateway.workers.values()):
        for worker_id, worker in list(gateway.workers.items()):
            worker.take(len(worker.inbox))
            if any(DEADLY in job.tokens for job in worker._jobs.values()):
                gateway.lose_worker(worker_id, crashed=crashed)
                gateway.start_worker(worker_id)
                deaths += 1
                continue
            while worker.has_jobs:
                worker.step(all_jobs=True)
            gateway.deliver(worker)
    return deaths


@pytest.mark.parametrize(("crashed", "most"), [(True, 3), (False, 5)])
@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_guilty_is_refused(workers: int, crashed: bool, most: int) -> None:
    gateway = Gateway(workers=workers)
    caches = [gateway.create(n) for n in range(6)]
    tickets = gateway.submit(*(decode(cache, DEADLY if n == 2 else 10 + n) for n, cache in enumerate(caches)))
    assert work(gateway, crashed=crashed) <= most
    assert gateway.reason(tickets.pop(2)) == "SEQUENCE_QUARANTINED"
    assert all(isinstance(gateway.replies[ticket], Appended) for ticket in tickets)
    assert gateway.tokens(caches[2]) == [2], "nothing was applied"
    # The others go on.
    assert all(
        isinstance(gateway.append(decode(cache, 30)), Appended) for n, cache in enumerate(caches) if n != 2
    )


def test_a_newcomer_does_not_throw_suspicion_on_a_suspect() -> None:
    """A suspect that is innocent runs beside one that nobody suspects yet, and that kills."""
    gateway = Gateway()
    first, second = gateway.create(1), gateway.create(2)
    index = gateway.machine.index
    entries = [index.find(cache, index.anonymous) for cache in (first, second)]
    assert entries[0] is not None
    # It was there when workers died of another.
    entries[0].crash_score = 4
    innocent, deadly = gateway.submit(decode(first, 10), decode(second, DEADLY))
    assert work(gateway) <= 4
    assert gateway.reason(deadly) == "SEQUENCE_QUARANTINED"
    assert isinstance(gateway.replies[innocent], Appended)


def test_who_was_only_there_when_workers_died_is_innocent_again() -> None:
    """Deaths long ago, with successes between them, are nobody's fault."""
    gateway = Gateway()
    cache = gateway.create(1)
    for token in range(10, 20):
        ticket = gateway.ask(decode(cache, token))
        gateway.lose_worker()
        gateway.start_worker("worker-0")
        gateway.work()
        assert isinstance(gateway.replies[ticket], Appended)


def test_who_is_computed_while_weights_are_replaced_is_innocent() -> None:
    """Its worker lives, and drops what it was computing on purpose."""
    gateway = Gateway()
    cache = gateway.create(1)
    (ticket,) = gateway.submit(decode(cache, 10))
    (worker,) = gateway.workers.values()
    for weights in range(1, 7):
        worker.replace_weights(weights)
        gateway.dispatcher.weights_replaced(weights, [worker.view(64)], recompute=True)
    work(gateway)
    assert isinstance(gateway.replies[ticket], Appended)


def test_workers_that_die_of_nothing_in_particular_are_told_to_be_lost() -> None:
    """Killed from outside again and again: some are asked to come again, nobody is served for ever."""
    gateway = Gateway()
    tickets = gateway.submit(*(prefill(n) for n in range(8)))
    for _ in range(30):
        gateway.lose_worker(crashed=False)
        gateway.start_worker("worker-0")
    gateway.work()
    reasons = {getattr(gateway.replies[ticket], "reason", "OK") for ticket in tickets}
    assert reasons <= {"OK", "WORKER_LOST", "SEQUENCE_QUARANTINED"}


def test_a_fork_of_what_is_quarantined_may_be_tried() -> None:
    """It has the tokens that were applied, and those have killed nobody."""
    gateway = Gateway()
    cache = gateway.create(1, 2)
    gateway.ask(decode(cache, DEADLY))
    work(gateway)
    (child,) = gateway.handles(Fork.of(cache, 1)).handles
    gateway.append(decode(child.cache_id, 7))
