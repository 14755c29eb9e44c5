"""Operations whose worker is gone, full or found again are computed once and rightly, one example each.

Each of these went wrong in a schedule of `tests/sim`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, OrderedDict

from quire.v1 import types_pb2

from service.caches.records import CacheForked, CacheReleased
from service.caches.requests import Append, Appended, AppendKind, Fork, Handles, Renew, Truncate
from service.caches.reservations import Limits
from service.errors import QuireError
from service.pool import wire
from tests.sim.appends import with_options
from tests.sim.harness import Gateway, decode, prefill, verify
from tests.sim.invariants import check_invariants
from tests.sim.model_worker import Faults, ModelWorker, Pool
from workers.common import worker_pb2


def test_a_replay_that_is_taken_back_leaves_no_tokens() -> None:
    gateway = Gateway()
    cache = gateway.create(1, 2)
    gateway.lose_worker()
    worker = gateway.start_worker("worker-0")
    gateway.append(decode(cache, 3))
    worker.forget()
    replaying = gateway.ask(decode(cache, 4))
    # The forward finds no KV, and the replay is answered too late.
    worker.work()
    gateway.deliver(worker)
    worker.work()
    gateway.cancel(replaying)
    gateway.work()
    assert gateway.held() in ([], [[]]), "what nobody counts is not kept"


def test_nothing_is_computed_for_a_cache_whose_release_is_being_written() -> None:
    """Its release may be durable before what was computed: the journal would have an append to no cache."""
    gateway = Gateway()
    journal = gateway.disk
    kept, released = gateway.create(1), gateway.create(2)
    gateway.start_worker("worker-1")
    late = dataclasses.replace(decode(kept, 3), timeout_s=1.0)
    refused, append, fork = gateway.submit(late, decode(released, 4), Fork.of(kept, 1, release=(released,)))
    journal.is_slow = True
    # The worker's death ends the first, whose end lets the fork begin while the second is placed anew.
    gateway.now_s = 2.0
    gateway.lose_worker("worker-0")
    gateway.work()
    journal.settle()
    check_invariants(gateway.machine)
    assert gateway.reason(refused) == "DEADLINE_PASSED" and isinstance(gateway.replies[fork], Handles)
    assert gateway.reason(append) == "CACHE_NOT_FOUND"
    assert [type(record) for record in journal.written[-2:]] == [CacheForked, CacheReleased]


def test_a_cache_that_returns_to_a_worker_that_has_kept_it_is_placed_anew() -> None:
    """Its epoch says so, as between any two workers."""
    gateway = Gateway(workers=2)
    cache = gateway.create(1, 2, 3)
    (entry,) = gateway.machine.index
    first = entry.worker
    assert first is not None
    gateway.lose_worker(first.worker_id)
    elsewhere = gateway.append(decode(cache, 4))
    assert elsewhere.worker_id != first.worker_id
    gateway.lose_worker(elsewhere.worker_id)
    gateway.dispatcher.worker_ready(dataclasses.replace(first, held=OrderedDict()), {entry.number: 3})
    (back,) = gateway.handles(Renew(cache)).handles
    assert back.worker_id == first.worker_id and back.epoch > elsewhere.epoch


def test_what_was_cut_and_extended_since_it_was_claimed_is_computed_again() -> None:
    """Since a worker that outlived an earlier gateway said what it has."""
    gateway = Gateway()
    cache = gateway.create(1, 2, 3)
    (entry,) = gateway.machine.index
    worker = ModelWorker("worker-1", 9, Pool(100), random.Random(0), Counter())
    worker.faults = Faults(step=0.0, control=0.0, timeout=0.0)
    worker.sequences = {entry.number: [1, 2, 3]}
    kept = worker.adopt(gateway.machine.claims(worker.holdings()))
    gateway.handles(Truncate(cache, 1))
    gateway.append(prefill(7, 8, cache_id=cache))
    gateway.lose_worker()
    gateway.workers[worker.worker_id] = worker
    gateway.dispatcher.worker_ready(worker.view(64), kept)
    gateway.append(decode(cache, 4))
    assert gateway.held() == [[1, 7, 8, 4]]


def test_a_creation_that_fails_for_two_callers_at_once_is_discarded_once() -> None:
    """Before, each such pair let one cache more be made than the limits allow."""
    gateway = Gateway()
    kept = gateway.create(1, 2, 3)
    late = dataclasses.replace(prefill(4, 5), request_id="same", timeout_s=0.0)
    for ticket in gateway.submit(late, late):
        assert gateway.reason(ticket) == "DEADLINE_PASSED"
    check_invariants(gateway.machine)
    assert gateway.machine.index.find(kept, gateway.machine.index.anonymous) is not None
    assert gateway.machine.index.anonymous.caches == 1


def test_what_ends_makes_room_for_what_begins_with_the_same_message() -> None:
    """A fork waits for a decode, and a scoring, whose cache counts as well, ends together with it."""
    gateway = Gateway(Limits(max_caches=3))
    cache = gateway.create(1, 2)
    gateway.create(3, 4)
    late = dataclasses.replace(decode(cache, 5), timeout_s=1.0)
    append, fork = gateway.submit(late, Fork.of(cache, 1))
    scoring = gateway.ask(Append(AppendKind.SCORE, "", (6, 7), timeout_s=1.0))
    refused = worker_pb2.WorkerError(reason=worker_pb2.WORKER_ERROR_REASON_TIMEOUT)
    events = [worker_pb2.WorkerEvent(op_id=command.op_id, error=refused) for command in gateway.sent[-2:]]
    worker = gateway.worker
    message = wire.to_events(worker_pb2.ConnectResponse(events=events))
    gateway.dispatcher.worker_answered(worker.worker_id, worker.epoch, message, 90)
    assert all(isinstance(gateway.replies[ticket], QuireError) for ticket in (append, scoring))
    assert isinstance(gateway.replies[fork], Handles)


def test_who_lost_pages_to_an_older_operation_does_not_take_them_back_before_that_has_computed() -> None:
    """A repeated verify on a copy and a new prefill took each other's pages for ever."""
    gateway = Gateway(pool=Pool(12, page_tokens=1))
    cache = gateway.create(*range(1, 9))
    gateway.append(verify(cache, 1, 2, position=8))
    # It has room, but gets nothing while another worker answers.
    silent = gateway.start_worker("worker-1")
    gateway.machine.worker_suspected("worker-1", silent.epoch, suspect=True)
    again = verify(cache, 1, 2, position=8)
    repeated = gateway.ask(with_options(again, output=types_pb2.OutputOptions(top_logprobs=1)))
    created = gateway.ask(prefill(*range(1, 9)))
    worker = gateway.workers["worker-0"]
    for _ in range(20):
        # The fork for the repetition comes first, and the younger operation begins first.
        worker.take(len(worker.inbox))
        for op_id in reversed(worker.queued):
            if worker.begin(op_id):
                worker.run(op_id)
        gateway.deliver(worker)
    assert gateway.reason(repeated) == "KV_EXHAUSTED", "the cache and a copy of it never fit"
    # The cache is idle now, and makes room.
    gateway.wait(1.0)
    gateway.work()
    assert isinstance(gateway.replies[created], Appended)
