"""What the state machine promises, one example each. `tests/sim` tries everything else."""

from __future__ import annotations

import dataclasses

import pytest
from quire.v1 import types_pb2

from service.caches.admission import MAX_WAITING_PER_CACHE, Limits
from service.caches.machine import CacheMachine
from service.caches.records import CacheCreated
from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Fork,
    Handles,
    PreviousCaches,
    Release,
    Released,
    Renew,
    Source,
    Truncate,
)
from service.errors import QuireError
from tests.sim.appends import with_options
from tests.sim.harness import Gateway, decode, prefill, verify
from tests.sim.model_worker import Pool


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def test_one_cache_cannot_fill_the_queue(gateway: Gateway) -> None:
    cache = gateway.create(1)
    tickets = gateway.submit(*(decode(cache, 2) for _ in range(MAX_WAITING_PER_CACHE + 2)))
    assert list(gateway.replies)[1:] == tickets[-1:]
    assert gateway.reason(tickets[-1]) == "QUEUE_FULL"
    renewal, release = gateway.submit(Renew(cache), Release(cache))
    gateway.work()
    assert isinstance(gateway.replies[renewal], Handles)
    assert gateway.replies[release] == Released(released=True), "what frees a cache is always let in"


def test_a_bug_while_starting_leaves_nothing_waiting(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = gateway.create(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("service.caches.worker_load.WorkerLoad.enter", lambda *_, **__: 1 / 0)
        error = gateway.refusal(decode(cache, 3))
    assert error.reason == "INTERNAL" and isinstance(error.__cause__, ZeroDivisionError)
    assert gateway.machine.operations_in_flight == 0
    assert gateway.append(decode(cache, 3)).seq_len == 3


# A Decode that its caller sends again, as ARCHITECTURE.md says it is answered.


def test_a_retry_of_the_last_append_needs_no_worker(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    asked = decode(cache, 4, position=3)
    first = gateway.append(asked)
    gateway.lose_worker()
    again = gateway.append(asked)
    assert (again.answer, again.seq_len, gateway.tokens(cache)) == (first.answer, 4, [1, 2, 3, 4])
    # Other outputs are computed, and nothing is appended for them.
    other = gateway.ask(decode(cache, 4, position=3, output=types_pb2.OutputOptions(top_logprobs=1)))
    assert other not in gateway.replies
    gateway.start_worker("worker-0")
    gateway.wait(0.1)
    gateway.work()
    found = gateway.replies[other]
    assert isinstance(found, Appended) and found.seq_len == 4 and found.replayed_tokens == 3


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_retry_while_the_first_runs_is_answered_with_it(is_durable: bool) -> None:
    """Also if the worker crashes: before its answer the first is computed again, after it nothing is."""
    gateway = Gateway(workers=2)
    cache = gateway.create(1, 2, 3)
    (worker_id,) = (name for name, worker in gateway.workers.items() if worker.sequences)
    gateway.disk.is_slow = True
    asked = decode(cache, 4, position=3)
    first = gateway.ask(asked)
    if is_durable:
        gateway.work()
    retry = gateway.ask(asked)
    gateway.lose_worker(worker_id)
    gateway.work()
    assert not {first, retry} & gateway.replies.keys(), "nothing is answered before it is durable"
    gateway.disk.settle()
    gateway.disk.is_slow = False
    found = [gateway.replies[ticket] for ticket in (first, retry)]
    assert all(isinstance(one, Appended) and one.seq_len == 4 for one in found)
    assert gateway.tokens(cache) == [1, 2, 3, 4]


@pytest.mark.parametrize("is_committing", [False, True])
def test_a_retry_of_a_cancelled_decode_is_applied_once(gateway: Gateway, is_committing: bool) -> None:
    cache = gateway.create(1, 2, 3)
    gateway.disk.is_slow = True
    asked = decode(cache, 4, position=3)
    first = gateway.ask(asked)
    if is_committing:
        gateway.work()
    gateway.cancel(first)
    retry = gateway.ask(asked)
    gateway.work()
    gateway.disk.settle()
    assert isinstance(gateway.replies[retry], Appended) and first not in gateway.replies
    assert gateway.tokens(cache) == [1, 2, 3, 4]


def test_what_is_not_the_last_append_any_more_is_fenced(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    asked = decode(cache, 4, position=3)
    gateway.append(asked)
    (fork,) = gateway.handles(Fork.of(cache, 1)).handles
    assert gateway.refusal(dataclasses.replace(asked, cache_id=fork.cache_id)).reason == "POSITION_MISMATCH"
    assert isinstance(gateway.run(asked), Appended), "the cache itself has changed nothing"
    gateway.run(Truncate(cache, 2))
    assert gateway.refusal(asked).reason == "POSITION_MISMATCH"
    gateway.append(decode(cache, 3, position=2))
    assert gateway.append(asked).seq_len == 4 and gateway.tokens(cache) == [1, 2, 3, 4], "it fits again"
    gateway.replace_weights(1, PreviousCaches.END)
    assert gateway.refusal(asked).reason == "WEIGHTS_CHANGED"


def test_pages_of_caches_start_where_they_are_asked_to() -> None:
    gateway = Gateway(pool=Pool(1000))
    caches = [gateway.create(1) for _ in range(5)]
    for _ in range(40):
        # Many come and go in between.
        caches += [handle.cache_id for handle in gateway.handles(Fork.of(caches[0], 10)).handles]
        for cache in caches[3:10]:
            gateway.release(cache)
        del caches[3:10]
    listed = list(gateway.machine.index.handles())
    assert [handle.cache_id for _, handle in listed] == caches
    after_a_restart = CacheMachine(Limits())
    for record in gateway.disk.written:
        after_a_restart.recovering(record, 0.0)
    after_a_restart.recovered(now_s=0.0, wall_s=0.0, tenant_of=lambda _name: after_a_restart.index.anonymous)
    for index, (number, _) in enumerate(listed):
        for machine in (gateway.machine, after_a_restart):
            assert [handle.cache_id for _, handle in machine.index.handles(number)] == caches[index + 1 :]


@pytest.mark.parametrize(("gone_s", "left_s"), [(4.0, 6.0), (-4.0, 10.0)], ids=["down", "clock set back"])
def test_leases_run_on_while_the_gateway_is_down(gone_s: float, left_s: float) -> None:
    machine = CacheMachine(Limits())
    machine.recovering(CacheCreated(1, "cache", "", b"", 0, 10.0, "", 0), wall_s=100.0)
    machine.recovered(now_s=50.0, wall_s=100.0 + gone_s, tenant_of=lambda _name: machine.index.anonymous)
    ((_, handle),) = machine.index.handles()
    assert handle.expires_at_s == 50.0 + left_s


def test_expired_caches_are_released_in_portions(gateway: Gateway) -> None:
    caches = [gateway.create(token, lease_s=1.0 + token) for token in range(10)]
    entries = list(gateway.machine.index)
    gateway.now_s = 8.0
    gateway.release(caches[0])
    assert [gateway.dispatcher.expire(entries[at : at + 4]) for at in (0, 0, 4, 8)] == [3, 0, 4, 0]
    assert [handle.cache_id for _, handle in gateway.machine.index.handles()] == caches[8:]


# Forks of several caches.


def forks(*sources: tuple[str, int], request_id: str = "") -> Fork:
    return Fork([Source(*source) for source in sources], (), request_id)


def test_a_fork_says_which_of_its_caches_is_at_fault(gateway: Gateway) -> None:
    first, second = gateway.create(1), gateway.create(2, 3)
    error = gateway.refusal(forks((first, 1), ("kv_never", 1)))
    assert error.reason == "CACHE_NOT_FOUND" and error.metadata == {"index": "1"}
    error = gateway.refusal(Fork([Source(first, 1), Source(second, 1, position=7)], ()))
    assert error.reason == "POSITION_MISMATCH"
    assert error.metadata == {"position": "7", "seq_len": "2", "index": "1"}


def test_whoever_a_fork_waits_for_gets_the_pages_of_its_other_caches() -> None:
    """Else they would wait for each other."""
    gateway = Gateway(pool=Pool(4, page_tokens=1))
    left, right = gateway.create(1, 2), gateway.create(3)
    step, fork = gateway.submit(prefill(4, 5, cache_id=right), forks((left, 1), (right, 1)))
    gateway.work()
    assert step not in gateway.replies, "there is no room for it beside the other cache"
    gateway.wait(1.0)
    gateway.work()
    made = gateway.replies[fork]
    assert isinstance(gateway.replies[step], Appended) and isinstance(made, Handles)
    assert [gateway.tokens(handle.cache_id) for handle in made.handles] == [[1, 2], [3, 4, 5]]


def test_the_request_id_of_a_fork_belongs_to_its_caches_and_counts(gateway: Gateway) -> None:
    left, right, other = gateway.create(1, 2), gateway.create(3), gateway.create(5)
    gateway.handles(forks((left, 2), (right, 1), request_id="f"))
    for sources in (
        [(left, 1), (right, 2)],
        [(right, 1), (left, 2)],
        [(right, 2), (left, 1)],
        [(left, 2), (other, 1)],
        [(left, 2), ("kv_never", 1)],
        [("kv_never", 2), (right, 1)],
        [(left, 2)],
        [(left, 3)],
        [(left, 2), (right, 1), (other, 1)],
    ):
        assert gateway.refusal(forks(*sources, request_id="f")).reason == "REQUEST_ID_REUSED", sources
    again = gateway.handles(forks((left, 2), (other, 0), (right, 1), request_id="f"))
    assert len(again.handles) == 3 and len(gateway.machine) == 6


def is_unavailable(outcome: object) -> bool:
    return isinstance(outcome, QuireError) and (outcome.code, outcome.reason, outcome.retry_after_s) == (
        "UNAVAILABLE",
        "JOURNAL_UNAVAILABLE",
        1.0,
    )


def test_nothing_is_computed_that_could_not_be_kept(gateway: Gateway) -> None:
    """Until the journal works again; what keeps nothing goes on."""
    cache = gateway.create(1)
    gateway.disk.fails = True
    gateway.run(Renew(cache))
    sent = len(gateway.sent)
    assert is_unavailable(gateway.run(decode(cache, 2))) and is_unavailable(gateway.run(prefill(3)))
    assert len(gateway.sent) == sent
    assert isinstance(gateway.run(Append(AppendKind.SCORE, "", [1, 2], rows=2)), Appended)


# Schedules that the simulator found, and that its seeds of each run do not come by.


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
