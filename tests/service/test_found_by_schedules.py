"""Schedules that the simulator found, and that its seeds of each run do not come by."""

from __future__ import annotations

import dataclasses

from quire.v1 import types_pb2

from service.caches.requests import Appended, PreviousCaches
from tests.sim.appends import with_options
from tests.sim.harness import Gateway, prefill, verify
from tests.sim.model_worker import Pool


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


def test_a_repeated_creation_that_was_checked_for_earlier_weights_is_asked_to_be_checked_again() -> None:
    """Another one has created the cache with the weights of now: the options may not fit these."""
    gateway = Gateway()
    gateway.replace_weights(1, PreviousCaches.END)
    gateway.append(prefill(1, 2, 3, request_id="key"))
    late = dataclasses.replace(prefill(1, 2, 3, request_id="key"), weights=0)
    assert gateway.reason(gateway.ask(late)) == "WEIGHTS_CHANGED"
    assert isinstance(gateway.run(dataclasses.replace(late, weights=1)), Appended)
