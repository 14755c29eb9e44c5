"""What keeps a decode of an existing cache from being sent at once: it is refused or placed as any append."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from service.caches.requests import AppendKind, Fork
from tests.sim.appends import append
from tests.sim.harness import MAX_SEQ_LEN, Gateway, decode


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


def test_it_was_checked_for_other_weights() -> None:
    gateway = Gateway()
    cache = gateway.create(1)
    assert gateway.refusal(append(AppendKind.DECODE, cache, (2,), weights=5)).reason == "WEIGHTS_CHANGED"
    gateway.append(append(AppendKind.DECODE, cache, (2,), weights=0))


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
