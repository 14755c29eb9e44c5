"""What is not durable has not happened: records that fail, or take their time."""

from __future__ import annotations

import pytest

from service.caches.requests import Append, Appended, AppendKind, Fork, Renew
from service.errors import QuireError
from tests.sim.harness import Gateway, decode, prefill
from tests.sim.invariants import check_invariants


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


def works_again(gateway: Gateway) -> None:
    """The disk does, as the dispatcher finds out by itself before long."""
    gateway.disk.fails = False
    gateway.machine.committed((), gateway.now_s)


def settle(gateway: Gateway) -> None:
    """The disk catches up."""
    gateway.disk.settle()
    check_invariants(gateway.machine)


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


def test_leases_that_run_out_are_looked_at_once_while_nothing_can_be_written(gateway: Gateway) -> None:
    for n in range(3):
        gateway.create(n, lease_s=1.0)
    gateway.now_s = 5.0
    gateway.disk.fails = True
    assert gateway.dispatcher.expire() == 3 and gateway.dispatcher.expire() == 0
    assert len(gateway.machine) == 3
    works_again(gateway)
    assert gateway.dispatcher.expire() == 3 and len(gateway.machine) == 0


@pytest.mark.parametrize("request_id", ["", "mine"])
def test_caches_of_a_caller_who_goes_while_they_are_written(gateway: Gateway, request_id: str) -> None:
    """Only those that he can ask for again stay."""
    parent = gateway.create(1)
    gateway.disk.is_slow = True
    of_fork = request_id and "another of mine"
    tickets = gateway.submit(prefill(5, request_id=request_id), Fork.of(parent, 2, (), of_fork))
    gateway.work()
    gateway.cancel(*tickets)
    settle(gateway)
    settle(gateway)
    gateway.work()
    assert len(gateway.machine) == (4 if request_id else 1)
    assert len(gateway.held()) == len(gateway.machine) == len(gateway.machine.ledger)


def test_a_fork_is_known_by_its_id_before_it_is_written(gateway: Gateway) -> None:
    """Else two that have one id would be mixed up. One that is not written leaves the id free."""
    left, right = gateway.create(1), gateway.create(2)
    gateway.disk.is_slow = gateway.disk.fails = True
    first, other = gateway.submit(Fork.of(left, 1, (), "f"), Fork.of(right, 2, (), "f"))
    assert gateway.reason(other) == "REQUEST_ID_REUSED"
    settle(gateway)
    assert is_unavailable(gateway.replies[first])
    gateway.disk.is_slow = False
    works_again(gateway)
    assert len(gateway.handles(Fork.of(right, 2, (), "f")).handles) == 2


def test_kv_that_comes_back_while_the_cache_grows_is_not_believed(gateway: Gateway) -> None:
    """It is as long as the cache was, not as it will be once that is written."""
    cache = gateway.create(1, 2)
    ticket = gateway.ask(decode(cache, 3))
    gateway.disk.is_slow = True
    gateway.work()
    sequences = {number: [1, 2] for number in gateway.worker.sequences}
    gateway.lose_worker(crashed=False)
    gateway.start_worker("worker-0", kept=dict.fromkeys(sequences, 2), sequences=sequences)
    settle(gateway)
    gateway.disk.is_slow = False
    assert isinstance(gateway.replies[ticket], Appended)
    sent = len(gateway.sent)
    assert gateway.append(decode(cache, 4)).replayed_tokens == 3
    forwards = [command.forward for command in gateway.sent[sent:] if command.HasField("forward")]
    assert [forward.position for forward in forwards] == [0, 3], "no forward is sent that has to fail"
    assert gateway.held() == [[1, 2, 3, 4]]
