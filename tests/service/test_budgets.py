"""What calls hold: how it is counted and given back, and how tenants share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.budgets import SMALL_BYTES, Budget, Budgets
from service.caches.tenants import Tenant
from service.config import Config
from service.errors import AnswersFull, ArrivingFull, BudgetFull, HttpLimit, SessionLimit, TooManyExecutions

ALICE, BOB, CAROL = Tenant("alice"), Tenant("bob"), Tenant("carol")
LIMIT = 100 * SMALL_BYTES
HALF = LIMIT // 2
BYTES = ("answers", "chunks", "bodies")


def budget_of(most: int) -> Budget:
    return Budget(most, AnswersFull, small=SMALL_BYTES)


def test_a_tenant_has_half_at_most() -> None:
    budget = budget_of(LIMIT)
    alice, bob = budget.share(ALICE), budget.share(BOB)
    alice.take(HALF)
    with pytest.raises(AnswersFull, match="of the tenant") as refused:
        alice.take(SMALL_BYTES + 1)
    assert refused.value.metadata == {"limit_bytes": str(HALF)}
    bob.take(HALF)
    with pytest.raises(AnswersFull):
        budget.share(CAROL).take(SMALL_BYTES + 1)
    alice.adjust(-HALF // 2, is_large=True)
    assert (budget.used, alice.used) == (LIMIT - HALF // 2, HALF // 2)
    alice.take(HALF // 2)


def test_an_answer_that_could_never_fit_is_admitted_alone() -> None:
    budget = budget_of(LIMIT)
    alice, bob = budget.share(ALICE), budget.share(BOB)
    bob.take(1000)
    alice.take(2 * LIMIT)
    for other in (2 * LIMIT, SMALL_BYTES + 1):
        with pytest.raises(AnswersFull):
            bob.take(other)
    assert bob.used == 1000, "what is refused counts nowhere"
    alice.give_back(2 * LIMIT)
    bob.take(2 * LIMIT)


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    for tenant in (None, ALICE):
        whole = budget_of(LIMIT)
        budget = whole if tenant is None else whole.share(tenant)
        budget.take(2 * LIMIT)
        for _ in range(budget.most // 1024):
            budget.take(1024)
        with pytest.raises(AnswersFull):
            budget.take(1024)
        budget.give_back(1024)
        budget.take(1024)


def test_of_some_things_a_tenant_leaves_half_to_others() -> None:
    budget = Budget(4, SessionLimit, leaves_half=True)
    alice, bob, carol = budget.share(ALICE), budget.share(BOB), budget.share(CAROL)
    alice.take()
    alice.take()
    with pytest.raises(SessionLimit, match="2 Sessions of the tenant"):
        alice.take()
    bob.take()
    with pytest.raises(SessionLimit, match="1 Sessions of the tenant"):
        bob.take()
    carol.take()
    with pytest.raises(SessionLimit, match="4 Sessions, or other streams"):
        budget.share(Tenant("dave")).take()
    alice.give_back()
    budget.share(Tenant("erin")).require()
    assert budget.used == 3, "who only asks takes nothing"


def test_what_one_call_holds_may_grow_as_long_as_it_is_alone() -> None:
    budget = Budget(100, ArrivingFull)
    budget.take(90)
    budget.take(90, own=90)
    with pytest.raises(ArrivingFull):
        budget.take(1)
    budget.give_back(180)
    budget.take(50)
    budget.take(50)
    with pytest.raises(ArrivingFull):
        budget.take(1, own=50)


def test_it_is_given_back_whatever_happens() -> None:
    budget = Budget(1, SessionLimit)

    def fails() -> None:
        with budget.share(ALICE).held():
            assert budget.used == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert budget.used == 0

    class Call:
        def __init__(self) -> None:
            self.ends: list[Callable[[Any], None]] = []

        def add_done_callback(self, callback: Any, /) -> None:
            self.ends.append(callback)

    first, second = Call(), Call()
    budget.take_until_done(1, first)
    with pytest.raises(SessionLimit):
        budget.take_until_done(1, second)
    assert not second.ends, "what is refused is not given back"
    first.ends[0](None)
    assert budget.used == 0


@pytest.mark.parametrize(
    ("name", "settings", "error"),
    [
        ("answers", {"max_unread_bytes": 10_000}, AnswersFull),
        ("chunks", {"max_unread_bytes": 20_000}, AnswersFull),
        ("executions", {"max_queued_operations": 10}, TooManyExecutions),
        ("streams", {"max_connections": 40}, SessionLimit),
        ("http", {"max_connections": 40}, HttpLimit),
        ("bodies", {"max_unread_bytes": 20_000}, ArrivingFull),
    ],
)
def test_each_budget_is_what_a_setting_says(
    name: str, settings: dict[str, Any], error: type[BudgetFull]
) -> None:
    budgets = Budgets.of_server(Config(**settings))
    whole: Budget = getattr(budgets, name)
    share: Budget = getattr(budgets.of(ALICE), name)
    share.take(whole.most // 2)
    with pytest.raises(error, match="of the tenant") as refused:
        share.take(5000 if name in BYTES else 1)
    assert refused.value.retry_after_s is not None and len(refused.value.metadata) == 1
    share.give_back(whole.most // 2)
    assert whole.used == share.used == 0


def test_who_exceeds() -> None:
    budget = budget_of(100)
    alice, bob = budget.share(ALICE), budget.share(BOB)

    def exceeded() -> tuple[bool, bool, bool]:
        return alice.is_exceeded, bob.is_exceeded, budget.is_exceeded

    alice.adjust(50)
    assert exceeded() == (True, False, False)
    bob.adjust(20)
    alice.adjust(40)
    assert exceeded() == (True, False, True), "bob has less than an equal part"
    bob.adjust(30)
    assert exceeded() == (True, True, True)
