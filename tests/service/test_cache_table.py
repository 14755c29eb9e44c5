"""What the state machine promises, one example each. `tests/sim` tries everything else."""

from __future__ import annotations

import pytest
from quire.v1 import types_pb2, worker_pb2

from service.caches.requests import Append, Appended, Fork, Handles, Kind, Release, Released, Renew, Truncate
from service.caches.table import MAX_WAITING_PER_CACHE, Limits
from service.errors import QueueFull, QuireError
from tests.sim.harness import MAX_SEQ_LEN, Gateway, answer_of, decode, prefill, verify
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
    assert result.handle is not None and result.handle.seq_len == 4
    assert answer_of(result).outputs[0].token_id == next_token([1, 2, 3, 4], None)
    assert gateway.tokens(cache) == [1, 2, 3, 4]


def test_an_append_without_a_position_is_not_fenced(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.append(decode(cache, 2))
    gateway.append(decode(cache, 2))
    assert gateway.tokens(cache) == [1, 2, 2]


def test_a_repeated_append_is_answered_from_memory(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    first = gateway.append(decode(cache, 3, position=2))
    sent = len(gateway.sent)
    assert gateway.append(decode(cache, 3, position=2)) == first
    assert len(gateway.sent) == sent
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_repetition_that_overtakes_the_answer_waits_for_it(gateway: Gateway) -> None:
    cache = gateway.create(1)
    first, again = (gateway.ask(decode(cache, 2, position=1)) for _ in range(2))
    gateway.work()
    assert gateway.replies[first] == gateway.replies[again]
    assert gateway.tokens(cache) == [1, 2]


def test_a_repetition_with_other_options_is_computed_on_a_copy(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    plain = gateway.append(decode(cache, 3, position=2))
    again = gateway.append(decode(cache, 3, position=2, output=LOGITS))
    assert answer_of(again).outputs[0].logits.data and not answer_of(plain).outputs[0].logits.data
    assert answer_of(again).outputs[0].token_id == answer_of(plain).outputs[0].token_id
    assert again.handle == plain.handle
    assert gateway.tokens(cache) == [1, 2, 3]
    assert gateway.held() == [[1, 2, 3]], "the copy is gone"


@pytest.mark.parametrize("reason", worker_pb2.WorkerErrorReason.values()[2:5])
def test_a_copy_does_not_outlive_a_failed_repetition(
    gateway: Gateway, reason: worker_pb2.WorkerErrorReason
) -> None:
    cache = gateway.create(1, 2)
    gateway.append(decode(cache, 3, position=2))
    ticket = gateway.ask(decode(cache, 3, position=2, output=LOGITS))
    gateway.worker.take(1)
    # The forward never begins, as when its deadline passes: the worker has nothing to roll back.
    gateway.refuse(gateway.worker.inbox.popleft().op_id, reason)
    gateway.work()
    assert ticket in gateway.replies
    assert gateway.held() == [[1, 2, 3]]


@pytest.mark.parametrize(("token_id", "position"), [(9, 2), (3, 1), (3, 4), (1, 0)])
def test_any_other_position_is_a_mismatch(gateway: Gateway, token_id: int, position: int) -> None:
    cache = gateway.create(1, 2)
    gateway.append(decode(cache, 3, position=2))
    error = gateway.refusal(decode(cache, token_id, position))
    assert error.reason == "POSITION_MISMATCH"
    assert error.metadata == {"position": str(position), "seq_len": "3"}
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_truncation_forgets_the_last_append(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.append(decode(cache, 3, position=2))
    gateway.handles(Truncate(cache, 2))
    gateway.append(decode(cache, 3, position=2))
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


def test_the_context_is_the_limit(gateway: Gateway) -> None:
    cache = gateway.create(*range(MAX_SEQ_LEN - 1))
    gateway.append(decode(cache, 1))
    error = gateway.refusal(decode(cache, 1))
    assert error.reason == "SEQUENCE_TOO_LONG"
    assert error.metadata == {"wanted_tokens": str(MAX_SEQ_LEN + 1), "kv_capacity_tokens": str(MAX_SEQ_LEN)}


def test_a_truncation_ends_at_the_end(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    error = gateway.refusal(Truncate(cache, 3))
    assert error.reason == "TRUNCATE_BEYOND_END"
    assert error.metadata == {"new_len": "3", "seq_len": "2"}


# Order, release, cancellation.


def test_operations_of_a_cache_run_in_order(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.ask(decode(cache, 2))
    gateway.ask(Truncate(cache, 1))
    last = gateway.ask(decode(cache, 3))
    assert len(gateway.worker.inbox) == 1, "the others wait in the gateway"
    gateway.work()
    assert list(gateway.replies)[-1] == last
    assert gateway.tokens(cache) == [1, 3]


def test_a_release_and_a_renewal_wait_their_turn(gateway: Gateway) -> None:
    cache = gateway.create(1)
    tickets = gateway.submit(
        decode(cache, 2, position=1), Truncate(cache, 1), Renew(cache, 50.0), decode(cache, 3), Release(cache)
    )
    assert not gateway.replies.keys() & set(tickets)
    gateway.work()
    assert list(gateway.replies)[1:] == tickets
    appended, truncated, renewed, again, released = (gateway.replies[ticket] for ticket in tickets)
    assert isinstance(appended, Appended) and isinstance(again, Appended)
    assert isinstance(truncated, Handles) and isinstance(renewed, Handles)
    assert [handle.expires_at_s for handle in renewed.handles] == [50.0]
    assert released == Released(released=True)
    assert gateway.held() == [] and len(gateway.table.ledger) == 0


def test_what_comes_after_a_release_finds_no_cache(gateway: Gateway) -> None:
    cache = gateway.create(1)
    before, release, after, again, renewal = gateway.submit(
        decode(cache, 2), Release(cache), decode(cache, 3), Release(cache), Renew(cache)
    )
    gateway.work()
    assert isinstance(gateway.replies[before], Appended)
    assert gateway.replies[release] == Released(released=True)
    assert gateway.replies[again] == Released(released=False)
    assert gateway.reason(after) == gateway.reason(renewal) == "CACHE_NOT_FOUND"
    assert gateway.held() == [] and len(gateway.table.ledger) == 0


def test_what_is_not_there_is_not_released(gateway: Gateway) -> None:
    cache = gateway.create(1)
    assert not gateway.release("unknown")
    assert gateway.release(cache)
    assert not gateway.release(cache)


def test_a_fork_that_releases_a_cache_ends_what_runs_and_waits_there(gateway: Gateway) -> None:
    cache, other = gateway.create(1), gateway.create(5)
    tickets = gateway.submit(decode(other, 6), Truncate(other, 0), Release(other))
    gateway.worker.take(1)
    gateway.handles(Fork.of(cache, 0, (other,)))
    assert [gateway.reason(ticket) for ticket in tickets[:2]] == ["CACHE_NOT_FOUND"] * 2
    assert gateway.replies[tickets[2]] == Released(released=False)
    assert gateway.held() == [[1]] and len(gateway.table.ledger) == 1


@pytest.mark.parametrize("computed", [False, True])
def test_a_cancelled_append_leaves_the_length(gateway: Gateway, computed: bool) -> None:
    cache = gateway.create(1, 2)
    ticket = gateway.ask(decode(cache, 3))
    if computed:
        gateway.worker.take(1)
        gateway.worker.step(all_jobs=True)
    gateway.cancel(ticket)
    gateway.work()
    assert ticket not in gateway.replies
    assert gateway.tokens(cache) == [1, 2] and gateway.held() == [[1, 2]]


def test_calls_that_are_cancelled_together_never_begin(gateway: Gateway) -> None:
    """The end of the first must not let the second begin: a fork of nothing would be done at once."""
    cache = gateway.create(1)
    gateway.handles(Truncate(cache, 0))
    tickets = gateway.submit(decode(cache, 2), decode(cache, 3), Fork.of(cache, 2), Renew(cache, 50.0))
    sent = len(gateway.sent)
    gateway.cancel(*tickets)
    assert [message.WhichOneof("command") for message in gateway.sent[sent:]] == ["abort", "truncate"]
    gateway.work()
    assert gateway.held() == [[]] and len(gateway.table) == 1
    assert [handle.expires_at_s for _, handle in gateway.table.handles()] == [1800.0]


def test_a_cancelled_creation_leaves_nothing(gateway: Gateway) -> None:
    gateway.cancel(gateway.ask(prefill(1, 2)))
    gateway.work()
    assert len(gateway.table) == len(gateway.table.ledger) == len(gateway.held()) == 0


def test_a_truncation_that_has_started_is_carried_out(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.cancel(gateway.ask(Truncate(cache, 1)))
    gateway.work()
    assert gateway.tokens(cache) == [1] and gateway.held() == [[1]]


def test_a_fork_copies_then_releases(gateway: Gateway) -> None:
    cache, other = gateway.create(1, 2), gateway.create(5)
    result = gateway.handles(Fork.of(cache, 2, (cache, other, "unknown", other)))
    copies = [handle.cache_id for handle in result.handles]
    assert [gateway.tokens(copy) for copy in copies] == [[1, 2], [1, 2]]
    gateway.append(decode(copies[0], 3))
    assert gateway.tokens(copies[1]) == [1, 2]
    gateway.work()
    assert gateway.held() == [[1, 2, 3], [1, 2]] and len(gateway.table) == 2


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


def test_a_repeated_creation_gets_the_first_cache(gateway: Gateway) -> None:
    first = gateway.append(prefill(1, 2, request_id="a"))
    assert gateway.append(prefill(1, 2, request_id="a")) == first
    assert len(gateway.table) == 1
    assert gateway.append(prefill(1, 2, request_id="b")).handle != first.handle


def test_a_request_id_belongs_to_its_tokens(gateway: Gateway) -> None:
    gateway.create(1, 2, request_id="a")
    assert gateway.refusal(prefill(1, 3, request_id="a")).reason == "REQUEST_ID_REUSED"


def test_a_repeated_creation_survives_the_first_ones_cancellation(gateway: Gateway) -> None:
    first, again = (gateway.ask(prefill(1, 2, request_id="a")) for _ in range(2))
    gateway.cancel(first)
    gateway.work()
    assert again in gateway.replies and gateway.held() == [[1, 2]]


# Repeated forks, and truncations that are fenced.


@pytest.mark.parametrize("releases", [False, True])
def test_a_repeated_fork_gets_the_first_ones_copies(gateway: Gateway, releases: bool) -> None:
    """Also when the first one has released the parent."""
    cache = gateway.create(1, 2)
    fork = Fork.of(cache, 2, (cache,) if releases else (), "f")
    first, again = gateway.submit(fork, fork)
    assert gateway.replies[first] == gateway.replies[again] == gateway.handles(fork)
    assert len(gateway.table) == (2 if releases else 3)
    other = gateway.handles(Fork.of(gateway.create(3), 2, (), "g"))
    assert other != gateway.replies[first]


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


def test_a_truncation_at_another_length_is_a_mismatch(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    error = gateway.refusal(Truncate(cache, 1, position=2))
    assert error.reason == "POSITION_MISMATCH" and error.metadata == {"position": "2", "seq_len": "3"}
    assert gateway.tokens(cache) == [1, 2, 3]
    gateway.handles(Truncate(cache, 1, position=3))
    assert gateway.tokens(cache) == [1]
    # A repetition: it is as long as it should be.
    assert gateway.handles(Truncate(cache, 1, position=3)).handles[0].seq_len == 1
    gateway.append(decode(cache, 4))
    assert gateway.refusal(Truncate(cache, 1, position=3)).reason == "POSITION_MISMATCH"


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


def test_a_release_is_carried_out_though_its_caller_has_gone(gateway: Gateway) -> None:
    cache = gateway.create(1)
    running, release = gateway.submit(decode(cache, 2), Release(cache))
    gateway.cancel(release)
    gateway.work()
    assert running in gateway.replies and release not in gateway.replies
    assert gateway.held() == [] and len(gateway.table.ledger) == 0


def test_draining_refuses_what_is_new_and_finishes_what_is_not(gateway: Gateway) -> None:
    ticket = gateway.ask(prefill(1))
    gateway.dispatcher.start_draining()
    assert gateway.refusal(prefill(1)).reason == "DRAINING"
    assert isinstance(gateway.replies[ticket], Appended)


@pytest.mark.parametrize("draining", [False, True])
def test_to_renew_and_release_there_is_always_room(draining: bool) -> None:
    gateway = Gateway(Limits(max_queued_operations=1))
    cache = gateway.create(1)
    append = gateway.ask(decode(cache, 2))
    if draining:
        gateway.dispatcher.start_draining()
    refused, renewal, release = gateway.submit(prefill(1), Renew(cache, 50.0), Release(cache))
    assert gateway.reason(refused) == ("DRAINING" if draining else "QUEUE_FULL")
    gateway.work()
    assert isinstance(gateway.replies[append], Appended) and isinstance(gateway.replies[renewal], Handles)
    assert gateway.replies[release] == Released(released=True)


def test_scoring_keeps_nothing(gateway: Gateway) -> None:
    result = gateway.append(Append(Kind.SCORE, "", [1, 2, 3], rows=3))
    assert result.handle is None and len(answer_of(result).outputs) == 3
    assert len(gateway.table) == len(gateway.table.ledger) == len(gateway.held()) == 0


def test_a_bug_while_starting_leaves_nothing_waiting(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = gateway.create(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("service.caches.computing.ForwardSequence", lambda *_, **__: 1 / 0)
        error = gateway.refusal(decode(cache, 3))
    assert error.reason == "INTERNAL" and isinstance(error.__cause__, ZeroDivisionError)
    assert gateway.table.operations_in_flight == 0
    assert gateway.append(decode(cache, 3)).handle is not None


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
    gateway.append(Append(Kind.SCORE, "", [4]))
    gateway.append(decode(cache, 2))
    assert gateway.release(cache)
    gateway.create(5)


def test_a_full_journal_takes_no_more_tokens() -> None:
    """Tokens under way count with those written; what frees a cache is let in."""
    gateway = Gateway(Limits(max_journal_bytes=4000))
    cache = gateway.create(*range(40))
    creations = (4000 - gateway.table.journal_bytes) // gateway.table.journal_bytes
    tickets = gateway.submit(*(prefill(*range(40)) for _ in range(creations + 1)))
    full = gateway.replies[tickets[-1]]
    assert isinstance(full, QuireError) and full.reason == "JOURNAL_FULL" and full.retry_after_s
    assert len(gateway.replies) == 2, "only the last has no room"
    gateway.cancel(*tickets)
    gateway.work()
    gateway.append(prefill(*range(20), cache_id=cache))
    gateway.handles(Truncate(cache, 10))
    assert gateway.release(cache)
    assert gateway.table.journal_bytes == 0


def test_forks_are_counted_before_they_are_made() -> None:
    """Copies share their tokens, and each takes room of its own all the same."""
    gateway = Gateway(Limits(max_journal_bytes=4000))
    cache = gateway.create(*range(40))
    assert gateway.refusal(Fork.of(cache, 10)).reason == "JOURNAL_FULL"
    tickets = gateway.submit(Fork.of(cache, 2), Fork.of(cache, 2), Fork.of(cache, 2))
    gateway.work()
    assert [isinstance(gateway.replies[ticket], Handles) for ticket in tickets] == [True, True, False]
    assert gateway.reason(tickets[-1]) == "JOURNAL_FULL"
    assert gateway.table.journal_bytes <= 4000
    gateway.handles(Fork.of(cache, 1))


def test_pages_of_caches_start_where_they_are_asked_to() -> None:
    gateway = Gateway(pool=Pool(1000))
    caches = [gateway.create(1) for _ in range(5)]
    for _ in range(40):
        # Many come and go in between.
        caches += [handle.cache_id for handle in gateway.handles(Fork.of(caches[0], 10)).handles]
        for cache in caches[3:10]:
            gateway.release(cache)
        del caches[3:10]
    listed = list(gateway.table.handles())
    assert [handle.cache_id for _, handle in listed] == caches
    for index, (order, _) in enumerate(listed):
        assert [handle.cache_id for _, handle in gateway.table.handles(order)] == caches[index + 1 :]
    assert len(gateway.table._catalog._listing) <= 3 * len(caches) + 100


def test_expired_caches_are_released_in_portions(gateway: Gateway) -> None:
    for token in range(10):
        gateway.create(token, lease_s=1.0)
    gateway.now_s = 5.0
    assert [gateway.dispatcher.expire(4) for _ in range(4)] == [4, 4, 2, 0]
