"""What the state machine promises, one example each. `tests/sim` tries everything else."""

from __future__ import annotations

import pytest
from quire.v1 import types_pb2, worker_pb2

from service.caches import table as sequences
from service.caches.requests import Append, ForkRequest, Kind, Reply, Rows, TruncateRequest
from service.caches.table import Limits
from service.errors import KvExhausted, QueueFull
from tests.sim.harness import MAX_SEQ_LEN, Gateway, decode, prefill, verify
from tests.sim.model_worker import next_token

LOGITS = types_pb2.OutputOptions(logits=types_pb2.LOGITS_FORMAT_F32)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# Fencing: DESIGN, section 4.


def test_a_step_is_journaled_and_answered(gateway: Gateway) -> None:
    cache = gateway.create(1, 2, 3)
    result = gateway.step(decode(cache, 4, position=3))
    assert result.handle is not None and result.handle.seq_len == 4
    assert result.done.outputs[0].token_id == next_token([1, 2, 3, 4], None)
    assert gateway.tokens(cache) == [1, 2, 3, 4]


def test_a_step_without_a_position_is_not_fenced(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.step(decode(cache, 2))
    gateway.step(decode(cache, 2))
    assert gateway.tokens(cache) == [1, 2, 2]


def test_a_repeated_step_is_answered_from_memory(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    first = gateway.step(decode(cache, 3, position=2))
    sent = len(gateway.sent)
    assert gateway.step(decode(cache, 3, position=2)) == first
    assert len(gateway.sent) == sent
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_repetition_that_overtakes_the_answer_waits_for_it(gateway: Gateway) -> None:
    cache = gateway.create(1)
    first, again = (gateway.submit(decode(cache, 2, position=1)) for _ in range(2))
    gateway.work()
    assert gateway.replies[first] == gateway.replies[again]
    assert gateway.tokens(cache) == [1, 2]


def test_a_repetition_with_other_options_is_computed_on_a_copy(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    plain = gateway.step(decode(cache, 3, position=2))
    again = gateway.step(decode(cache, 3, position=2, output=LOGITS))
    assert again.done.outputs[0].logits.data and not plain.done.outputs[0].logits.data
    assert again.done.outputs[0].token_id == plain.done.outputs[0].token_id
    assert again.handle == plain.handle
    assert gateway.tokens(cache) == [1, 2, 3]
    assert gateway.held() == [[1, 2, 3]], "the copy is gone"


@pytest.mark.parametrize("reason", list(worker_pb2.WorkerErrorReason.values())[2:5])
def test_a_copy_does_not_outlive_a_failed_repetition(gateway: Gateway, reason: int) -> None:
    cache = gateway.create(1, 2)
    gateway.step(decode(cache, 3, position=2))
    ticket = gateway.submit(decode(cache, 3, position=2, output=LOGITS))
    gateway.worker.take(1)
    # The forward never begins, as when its deadline passes: the worker has nothing to roll back.
    assert gateway.worker.inbox.popleft().op_id == ticket
    gateway.refuse(ticket, reason)
    gateway.work()
    assert gateway.held() == [[1, 2, 3]]


@pytest.mark.parametrize(("token_id", "position"), [(9, 2), (3, 1), (3, 4), (1, 0)])
def test_any_other_position_is_a_mismatch(gateway: Gateway, token_id: int, position: int) -> None:
    cache = gateway.create(1, 2)
    gateway.step(decode(cache, 3, position=2))
    error = gateway.refusal(decode(cache, token_id, position))
    assert error.reason == "POSITION_MISMATCH"
    assert error.metadata == {"position": str(position), "seq_len": "3"}
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_truncation_forgets_the_last_step(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.step(decode(cache, 3, position=2))
    gateway.handles(TruncateRequest(cache, 2))
    gateway.step(decode(cache, 3, position=2))
    assert gateway.tokens(cache) == [1, 2, 3]


def test_a_verify_keeps_what_is_accepted_and_is_repeatable(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    right = next_token([1, 2, 3], None)
    wrong = next_token([1, 2, 3, right], None) + 1
    step = verify(cache, 3, right, wrong, 5, position=2)
    first = gateway.step(step)
    assert first.kept == 2 and len(first.done.outputs) == 4
    assert gateway.tokens(cache) == [1, 2, 3, right]
    assert gateway.step(step) == first
    assert gateway.refusal(verify(cache, 3, right, wrong, 5, position=2, accept=False)).reason == (
        "POSITION_MISMATCH"
    )


def test_the_context_is_the_limit(gateway: Gateway) -> None:
    cache = gateway.create(*range(MAX_SEQ_LEN - 1))
    gateway.step(decode(cache, 1))
    error = gateway.refusal(decode(cache, 1))
    assert error.reason == "SEQUENCE_TOO_LONG"
    assert error.metadata == {"wanted_tokens": str(MAX_SEQ_LEN + 1), "max_seq_len": str(MAX_SEQ_LEN)}


def test_a_truncation_ends_at_the_end(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    error = gateway.refusal(TruncateRequest(cache, 3))
    assert error.reason == "TRUNCATE_BEYOND_END"
    assert error.metadata == {"new_len": "3", "seq_len": "2"}


# Order, release, cancellation.


def test_operations_of_a_cache_run_in_order(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.submit(decode(cache, 2))
    gateway.submit(TruncateRequest(cache, 1))
    last = gateway.submit(decode(cache, 3))
    assert len(gateway.worker.inbox) == 1, "the others wait in the gateway"
    gateway.work()
    assert list(gateway.replies)[-1] == last
    assert gateway.tokens(cache) == [1, 3]


def test_a_release_ends_what_runs_and_waits(gateway: Gateway) -> None:
    cache = gateway.create(1)
    tickets = [gateway.submit(decode(cache, 2)) for _ in range(2)]
    gateway.worker.take(1)
    assert gateway.release(cache)
    assert [gateway.reason(ticket) for ticket in tickets] == ["CACHE_NOT_FOUND"] * 2
    assert not gateway.release(cache)
    gateway.work()
    assert gateway.held() == [] and len(gateway.journal) == 0


@pytest.mark.parametrize("computed", [False, True])
def test_a_cancelled_step_leaves_the_length(gateway: Gateway, computed: bool) -> None:
    cache = gateway.create(1, 2)
    ticket = gateway.submit(decode(cache, 3))
    if computed:
        gateway.worker.take(1)
        gateway.worker.step(all_jobs=True)
    gateway.cancel(ticket)
    gateway.work()
    assert ticket not in gateway.replies
    assert gateway.tokens(cache) == [1, 2] and gateway.held() == [[1, 2]]


def test_a_cancelled_creation_leaves_nothing(gateway: Gateway) -> None:
    gateway.cancel(gateway.submit(prefill(1, 2)))
    gateway.work()
    assert len(gateway.table) == len(gateway.journal) == len(gateway.held()) == 0


def test_a_truncation_that_has_started_is_carried_out(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    gateway.cancel(gateway.submit(TruncateRequest(cache, 1)))
    gateway.work()
    assert gateway.tokens(cache) == [1] and gateway.held() == [[1]]


def test_a_beam_step_copies_then_releases(gateway: Gateway) -> None:
    cache, other = gateway.create(1, 2), gateway.create(5)
    result = gateway.handles(ForkRequest(cache, 2, (cache, other, "unknown", other)))
    copies = [handle.cache_id for handle in result.handles]
    assert [gateway.tokens(copy) for copy in copies] == [[1, 2], [1, 2]]
    gateway.step(decode(copies[0], 3))
    assert gateway.tokens(copies[1]) == [1, 2]
    gateway.work()
    assert gateway.held() == [[1, 2, 3], [1, 2]] and len(gateway.table) == 2


def test_a_cancelled_fork_releases_nothing_and_leaves_no_copy(gateway: Gateway) -> None:
    cache = gateway.create(1, 2)
    ticket = gateway.submit(ForkRequest(cache, 2, (cache,)))
    gateway.worker.take(1)
    gateway.cancel(ticket)
    gateway.work()
    assert gateway.tokens(cache) == [1, 2] and gateway.held() == [[1, 2]]


def test_an_empty_cache_needs_no_copy_in_the_worker(gateway: Gateway) -> None:
    cache = gateway.create(1)
    gateway.handles(TruncateRequest(cache, 0))
    # The worker rolls a step back to nothing, and with it the sequence.
    ticket = gateway.submit(decode(cache, 2))
    gateway.worker.take(1)
    gateway.cancel(ticket)
    gateway.work()
    assert gateway.held() == []
    gateway.handles(TruncateRequest(cache, 0))
    (child,) = gateway.handles(ForkRequest(cache, 1)).handles
    gateway.step(decode(child.cache_id, 3))
    gateway.step(decode(cache, 4))
    assert gateway.held() == [[3], [4]]


# Repeated creations.


def test_a_repeated_creation_gets_the_first_cache(gateway: Gateway) -> None:
    first = gateway.step(prefill(1, 2, request_id="a"))
    assert gateway.step(prefill(1, 2, request_id="a")) == first
    assert len(gateway.table) == 1
    assert gateway.step(prefill(1, 2, request_id="b")).handle != first.handle


def test_a_request_id_belongs_to_its_tokens(gateway: Gateway) -> None:
    gateway.create(1, 2, request_id="a")
    assert gateway.refusal(prefill(1, 3, request_id="a")).reason == "REQUEST_ID_REUSED"


def test_a_repeated_creation_survives_the_first_ones_cancellation(gateway: Gateway) -> None:
    first, again = (gateway.submit(prefill(1, 2, request_id="a")) for _ in range(2))
    gateway.cancel(first)
    gateway.work()
    assert again in gateway.replies and gateway.held() == [[1, 2]]


# Limits.


def test_a_full_queue_says_when_to_come_back() -> None:
    gateway = Gateway(Limits(max_queued_operations=2))
    tickets = [gateway.submit(prefill(1)) for _ in range(3)]
    assert gateway.reason(tickets[2]) == "QUEUE_FULL"
    error = gateway.replies[tickets[2]]
    assert isinstance(error, QueueFull) and error.retry_after_s


def test_one_cache_cannot_fill_the_queue(gateway: Gateway) -> None:
    cache = gateway.create(1)
    tickets = [gateway.submit(decode(cache, 2)) for _ in range(sequences.MAX_WAITING_PER_CACHE + 2)]
    assert list(gateway.replies)[1:] == tickets[-1:]
    assert gateway.reason(tickets[-1]) == "QUEUE_FULL"


def test_draining_refuses_what_is_new_and_finishes_what_is_not(gateway: Gateway) -> None:
    ticket = gateway.submit(prefill(1))
    gateway.table.draining = True
    assert gateway.refusal(prefill(1)).reason == "DRAINING"
    assert not isinstance(gateway.replies[ticket], Exception)


def test_scoring_keeps_nothing(gateway: Gateway) -> None:
    result = gateway.step(Append(Kind.SCORE, "", [1, 2, 3], rows=Rows.ALL))
    assert result.handle is None and len(result.done.outputs) == 3
    assert len(gateway.table) == len(gateway.journal) == len(gateway.held()) == 0


def test_a_bug_while_starting_leaves_nothing_waiting(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = gateway.create(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr("service.pool.commands.forward", lambda *_, **__: 1 / 0)
        error = gateway.refusal(decode(cache, 3))
    assert error.reason == "INTERNAL" and isinstance(error.__cause__, ZeroDivisionError)
    assert gateway.table.operations_in_flight == 0
    assert gateway.step(decode(cache, 3)).handle is not None


def test_what_can_never_fit_is_refused_without_a_reason_to_wait() -> None:
    table = sequences.CacheTable(Limits())
    table.worker_ready("worker", 1, pages_available=4, max_seq_len=1000)
    ticket = table.submit(Append(Kind.PREFILL, "", list(range(65))), 0.0)
    replies = [effect for effect in table.take_effects() if isinstance(effect, Reply)]
    assert [reply.ticket for reply in replies] == [ticket]
    error = replies[0].outcome
    assert isinstance(error, KvExhausted)
    assert error.retry_after_s is None and error.metadata["pages_needed"] == "5"
