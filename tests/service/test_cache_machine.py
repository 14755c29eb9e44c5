"""What the state machine promises, one example each. `tests/sim` tries everything else."""

from __future__ import annotations

import pytest
from quire.v1 import types_pb2

from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Fork,
    Handles,
    Release,
    Released,
    Renew,
    Truncate,
)
from service.caches.reservations import MAX_WAITING_PER_CACHE, Limits
from service.errors import QueueFull, QuireError
from tests.sim.harness import Gateway, answer_of, decode, prefill, verify
from tests.sim.model_worker import Pool
from tests.sim.toy_model import next_token

LOGITS = types_pb2.OutputOptions(logits=types_pb2.LOGITS_FORMAT_F32)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# Fencing: DESIGN, section 4.


def test_an_append_is_journaled_and_answered(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    result = gateway.append(decode(cache, 4, position=3))
    assert result.seq_len == 4
    assert answer_of(result).outputs[0].token_id == next_token([1, 2, 3, 4], None)
    assert gateway.tokens(cache) == [1, 2, 3, 4]


def test_a_repeated_append_is_answered_from_memory(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    first = gateway.append(decode(cache, 3, position=2))
    sent = len(gateway.sent)
    assert gateway.append(decode(cache, 3, position=2)) == first
    assert len(gateway.sent) == sent
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_verify_keeps_what_is_accepted_and_is_repeatable(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    right = next_token([1, 2, 3], None)
    wrong = next_token([1, 2, 3, right], None) + 1
    append = verify(cache, 3, right, wrong, 5, position=2)
    first = gateway.append(append)
    assert first.kept == 2 and len(answer_of(first).outputs) == 4
    assert gateway.tokens(cache) == [1, 2, 3, right]
    assert gateway.append(append) == first
    assert gateway.refusal(verify(cache, 3, right, wrong, 5, position=2, accept=False)).reason == (
        "POSITION_MISMATCH"
    )


def test_a_truncation_ends_at_the_end(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    error = gateway.refusal(Truncate(cache, 3))
    assert error.reason == "TRUNCATE_BEYOND_END"
    assert error.metadata == {"new_len": "3", "seq_len": "2"}


# Releases and cancellation.


def test_what_a_fork_releases_is_one_command_to_a_worker(gateway: Gateway) -> None:
    cache, *others = (gateway.create(token) for token in range(20))
    gateway.sent.clear()
    gateway.handles(Fork.of(cache, 2, others))
    assert [len(command.release.sequences) for command in gateway.sent if command.HasField("release")] == [19]
    gateway.work()
    assert gateway.held() == [[0]] * 3


def test_a_fork_that_is_cancelled_before_its_turn_releases_nothing_and_leaves_no_copy(
    gateway: Gateway,
) -> None:
    cache = gateway.create(1, 2)
    _, fork = gateway.submit(decode(cache, 3), Fork.of(cache, 2, (cache,)))
    gateway.cancel(fork)
    gateway.work()
    assert gateway.tokens(cache) == [1, 2, 3] and gateway.held() == [[1, 2, 3]]


def test_an_empty_cache_needs_no_copy_in_the_worker(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.handles(Truncate(cache, 0))
    # The worker rolls an append back to nothing, and with it the sequence.
    ticket = gateway.ask(decode(cache, 2))
    gateway.worker.take(len(gateway.worker.inbox))
    gateway.worker.begin(gateway.sent[-1].op_id)
    gateway.cancel(ticket)
    gateway.work()
    assert gateway.held() == []
    gateway.handles(Truncate(cache, 0))
    (child,) = gateway.handles(Fork.of(cache, 1)).handles
    gateway.append(decode(child.cache_id, 3))
    gateway.append(decode(cache, 4))
    assert gateway.held() == [[3], [4]]


# Repeated creations.


def test_a_request_id_belongs_to_its_tokens(gateway: Gateway) -> None:
    gateway.create(1, 2, request_id="a")
    assert gateway.refusal(prefill(1, 3, request_id="a")).reason == "REQUEST_ID_REUSED"


def test_a_repeated_creation_survives_the_first_ones_cancellation(gateway: Gateway) -> None:
    first, again = (gateway.ask(prefill(1, 2, request_id="a")) for _ in range(2))
    gateway.cancel(first)
    gateway.work()
    assert again in gateway.replies and gateway.held() == [[1, 2]]


# Repeated forks.


def test_the_request_id_of_a_fork_belongs_to_it(gateway: Gateway) -> None:
    cache, other = gateway.create(1), gateway.create(2)
    gateway.handles(Fork.of(cache, 2, (), "f"))
    assert gateway.refusal(Fork.of(cache, 3, (), "f")).reason == "REQUEST_ID_REUSED"
    assert gateway.refusal(Fork.of(other, 2, (), "f")).reason == "REQUEST_ID_REUSED"


def test_a_fork_is_not_repeated_once_a_copy_is_gone(gateway: Gateway) -> None:
    cache = gateway.create(1)
    left, right = gateway.handles(Fork.of(cache, 2, (), "f")).handles
    gateway.release(left.cache_id)
    assert gateway.refusal(Fork.of(cache, 2, (), "f")).reason == "CACHE_NOT_FOUND"
    gateway.release(right.cache_id)
    assert len(gateway.handles(Fork.of(cache, 2, (), "f")).handles) == 2, "nothing is known of it any more"


def test_a_fork_that_was_under_way_when_another_released_its_parent_is_still_a_repetition(
    gateway: Gateway,
) -> None:
    cache, other = gateway.create(1), gateway.create(2)
    made = gateway.handles(Fork.of(cache, 1, (), "f"))
    gateway.ask(decode(cache, 3))
    again = gateway.ask(Fork.of(cache, 1, (), "f"))
    gateway.handles(Fork.of(other, 0, (cache,)))
    assert gateway.replies[again] == made


# Limits.


def test_a_full_queue_says_when_to_come_back() -> None:
    gateway = Gateway(Limits(max_queued_operations=2))
    tickets = [gateway.ask(prefill(1)) for _ in range(3)]
    assert gateway.reason(tickets[2]) == "QUEUE_FULL"
    error = gateway.replies[tickets[2]]
    assert isinstance(error, QueueFull) and error.retry_after_s


def test_one_cache_cannot_fill_the_queue(gateway: Gateway) -> None:
    cache = gateway.create(1)
    tickets = gateway.submit(*(decode(cache, 2) for _ in range(MAX_WAITING_PER_CACHE + 2)))
    assert list(gateway.replies)[1:] == tickets[-1:]
    assert gateway.reason(tickets[-1]) == "QUEUE_FULL"
    renewal, release = gateway.submit(Renew(cache), Release(cache))
    gateway.work()
    assert isinstance(gateway.replies[renewal], Handles)
    assert gateway.replies[release] == Released(released=True), "what frees a cache is always let in"


def test_draining_refuses_what_is_new_and_finishes_what_is_not(gateway: Gateway) -> None:
    ticket = gateway.ask(prefill(1))
    gateway.dispatcher.start_draining()
    assert gateway.refusal(prefill(1)).reason == "DRAINING"
    assert isinstance(gateway.replies[ticket], Appended)


def test_a_bug_while_starting_leaves_nothing_waiting(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = gateway.create(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("service.caches.attempts.Attempt", lambda *_, **__: 1 / 0)
        error = gateway.refusal(decode(cache, 3))
    assert error.reason == "INTERNAL" and isinstance(error.__cause__, ZeroDivisionError)
    assert gateway.machine.operations_in_flight == 0
    assert gateway.append(decode(cache, 3)).seq_len == 3


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_what_can_never_fit_is_refused_without_a_reason_to_wait(page_tokens: int) -> None:
    """More than all the worker's pages, less than the model's context."""
    gateway = Gateway(pool=Pool(48 // page_tokens, page_tokens))
    error = gateway.refusal(prefill(*range(49)))
    assert error.reason == "SEQUENCE_TOO_LONG" and error.retry_after_s is None
    assert error.metadata == {"wanted_tokens": "49", "kv_capacity_tokens": "48"}
    cache = gateway.create(*range(48))
    assert gateway.refusal(decode(cache, 1)).reason == "SEQUENCE_TOO_LONG"


# Budgets: what exceeds one is refused before a worker hears of it.


def test_no_more_caches_are_held_than_allowed() -> None:
    """Those that are being made count; scoring makes none."""
    gateway = Gateway(Limits(max_caches=3))
    cache = gateway.create(1, request_id="r")
    under_way = gateway.ask(prefill(2))
    sent = len(gateway.sent)
    assert gateway.refusal(Fork.of(cache, 2)).reason == "CACHE_LIMIT"
    gateway.work()
    gateway.handles(Fork.of(cache, 1))
    refused = gateway.refusal(prefill(3))
    assert refused.reason == "CACHE_LIMIT" and refused.retry_after_s
    assert not any(message.HasField("fork") for message in gateway.sent[sent:-1])
    assert isinstance(gateway.replies[under_way], Appended)
    # What makes no cache goes on.
    gateway.append(prefill(1, request_id="r"))
    gateway.append(Append(AppendKind.SCORE, "", [4]))
    gateway.append(decode(cache, 2))
    assert gateway.release(cache)
    gateway.create(5)


def test_a_full_journal_takes_no_more_tokens() -> None:
    """Tokens under way count with those written; what frees a cache is let in."""
    gateway = Gateway(Limits(max_journal_bytes=4000))
    cache = gateway.create(*range(40))
    creations = (4000 - gateway.machine.ledger.size_bytes) // gateway.machine.ledger.size_bytes
    tickets = gateway.submit(*(prefill(*range(40)) for _ in range(creations + 1)))
    full = gateway.replies[tickets[-1]]
    assert isinstance(full, QuireError) and full.reason == "JOURNAL_FULL" and full.retry_after_s
    assert len(gateway.replies) == 2, "only the last has no room"
    gateway.cancel(*tickets)
    gateway.work()
    gateway.append(prefill(*range(20), cache_id=cache))
    gateway.handles(Truncate(cache, 10))
    assert gateway.release(cache)
    assert gateway.machine.ledger.size_bytes == 0


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
    for index, (order, _) in enumerate(listed):
        assert [handle.cache_id for _, handle in gateway.machine.index.handles(order)] == caches[index + 1 :]


def test_expired_caches_are_released_in_portions(gateway: Gateway) -> None:
    for token in range(10):
        gateway.create(token, lease_s=1.0)
    gateway.now_s = 5.0
    assert [gateway.dispatcher.expire(4) for _ in range(4)] == [4, 4, 2, 0]
