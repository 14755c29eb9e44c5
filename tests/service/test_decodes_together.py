"""Where decodes that pass together meet something else."""

from __future__ import annotations

import struct

import pytest
from quire.v1 import worker_pb2

from service.caches.ledger import Ledger
from service.caches.requests import Append, AppendKind, Fork
from service.metrics.figures import Appends
from tests.sim.appends import append
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.model_worker import TIMEOUT


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
