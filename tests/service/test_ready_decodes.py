"""What keeps a decode of an existing cache from being sent at once: it is refused or placed as any append."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from service.caches.ledger import Ledger
from service.caches.requests import Append, AppendKind, Fork
from service.extensions.metrics.figures import Appends
from tests.sim.appends import append
from tests.sim.harness import MAX_SEQ_LEN, Gateway, decode, prefill
from tests.sim.model_worker import TIMEOUT
from workers.common import worker_pb2


def drain(gateway: Gateway) -> None:
    gateway.dispatcher.start_draining()


def lose_the_lease(gateway: Gateway) -> None:
    gateway.machine.admission.lease.valid_until_s = gateway.now_s


def stall_the_journal(gateway: Gateway) -> None:
    gateway.machine.journal_stalls()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        (drain, "DRAINING"),
        (lose_the_lease, "JOURNAL_UNAVAILABLE"),
        (stall_the_journal, "JOURNAL_UNAVAILABLE"),
    ],
)
def test_the_gateway_takes_none(happens: Callable[[Gateway], None], reason: str) -> None:
    gateway = Gateway()
    cache = gateway.create(1, 2)
    happens(gateway)
    assert gateway.refusal(decode(cache, 3)).reason == reason
    assert gateway.tokens(cache) == [1, 2]


def test_a_worker_has_no_room_for_a_longer_sequence() -> None:
    gateway = Gateway()
    cache = gateway.create(*range(MAX_SEQ_LEN - 1))
    gateway.append(decode(cache, 3))
    assert gateway.refusal(decode(cache, 4)).reason == "SEQUENCE_TOO_LONG"


def test_a_worker_that_leaves_gets_none() -> None:
    gateway = Gateway(workers=2)
    parent = gateway.create(1, 2)
    (leaving,) = [worker for worker in gateway.workers.values() if worker.sequences]
    fork = gateway.ask(Fork.of(parent, 1))
    gateway.dispatcher.worker_draining(leaving.worker_id, leaving.epoch)
    gateway.work()
    (child,) = gateway.replies[fork].handles  # type: ignore[union-attr]
    assert gateway.append(decode(child.cache_id, 3)).worker_id not in ("", leaving.worker_id)


def test_a_lease_restarts_when_it_begins() -> None:
    gateway = Gateway()
    cache = gateway.create(1, lease_s=5.0)
    gateway.now_s = 4.0
    gateway.ask(decode(cache, 2))
    (shown,) = [handle for _, handle in gateway.machine.index.handles()]
    assert shown.expires_at_s == 9.0


# Where decodes that pass together meet something else.


def _answer_row(op_id: int) -> worker_pb2.WorkerEvent:
    rows = struct.pack("<5Q", op_id, 5, 0, 0, 0)
    return worker_pb2.WorkerEvent(decodes=worker_pb2.DecodesDone(rows=rows))


def test_a_fork_releases_a_cache_whose_decode_is_committed_with_it() -> None:
    gateway = Gateway()
    parent, other = gateway.create(1, 2), gateway.create(3, 4)
    decoded, _ = gateway.submit(decode(other, 5), decode(parent, 6))
    done, late = gateway.machine._attempts.running
    gateway.ask(Fork.of(parent, 1, release=(other,)))
    gateway.worker.outbox.append(_answer_row(done))
    # Ends the parent's decode, so that the fork begins in the same turn.
    gateway.refuse(late, TIMEOUT)
    assert gateway.replies[decoded].seq_len == 3  # type: ignore[union-attr]


def test_a_prefill_that_repeats_a_decode_is_counted() -> None:
    gateway = Gateway()
    cache = gateway.create(1, 2)
    gateway.append(decode(cache, 3, position=2))
    repeated = prefill(3, cache_id=cache, position=2)
    answer, appends = gateway.append(repeated), Appends()
    appends.observing([repeated], lambda _: None)([(0, answer)])
    assert appends.answered[repeated.kind] == 1


@pytest.mark.parametrize("request_", [prefill(1, 2, 3), append(AppendKind.SCORE, "", (1, 2, 3))])
def test_a_workers_row_for_another_forward_makes_no_record_that_conflicts(request_: Append) -> None:
    gateway = Gateway()
    gateway.ask(request_)
    (op_id,) = gateway.machine._attempts.running
    gateway.worker.outbox.append(_answer_row(op_id))
    gateway.deliver(gateway.worker)
    ledger = Ledger()
    for record in gateway.disk.written:
        ledger.apply(record)
