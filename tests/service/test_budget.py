"""Memory for answers: how it is counted, and how tenants share it."""

from __future__ import annotations

import gc

import pytest

from service.api.budget import COPIES, SMALL_BYTES, AnswerBudget, in_memory
from service.caches.tenants import Tenant
from service.errors import AnswersFull

ALICE, BOB = Tenant("alice"), Tenant("bob")


LIMIT = 100 * SMALL_BYTES
HALF = LIMIT // 2


def test_a_tenant_has_half_at_most() -> None:
    budget = AnswerBudget(LIMIT)
    budget.of(ALICE).take(HALF)
    with pytest.raises(AnswersFull) as refused:
        budget.of(ALICE).take(SMALL_BYTES + 1)
    assert refused.value.metadata == {"limit_bytes": str(HALF)}
    budget.of(BOB).take(HALF)
    with pytest.raises(AnswersFull):
        budget.of(Tenant("carol")).take(SMALL_BYTES + 1)
    budget.of(ALICE).adjust(-HALF // 2, is_large=True)
    assert (budget.used_bytes, budget.of(ALICE).used_bytes) == (LIMIT - HALF // 2, HALF // 2)
    budget.of(ALICE).take(HALF // 2)


def test_an_answer_that_could_never_fit_is_admitted_alone() -> None:
    budget = AnswerBudget(LIMIT)
    budget.of(BOB).take(1000)
    budget.of(ALICE).take(2 * LIMIT)
    for other in (2 * LIMIT, SMALL_BYTES + 1):
        with pytest.raises(AnswersFull):
            budget.of(BOB).take(other)
    assert budget.of(BOB).used_bytes == 1000, "what is refused counts nowhere"
    budget.of(ALICE).adjust(-2 * LIMIT, is_large=True)
    budget.of(BOB).take(2 * LIMIT)


def test_who_asks_for_little_does_not_wait_for_who_asks_for_much() -> None:
    budget = AnswerBudget(LIMIT)
    budget.take(2 * LIMIT)
    for _ in range(LIMIT // 1024):
        budget.take(1024)
    with pytest.raises(AnswersFull):
        budget.take(1024)
    budget.adjust(-1024)
    budget.take(1024)


def test_callers_without_a_tenant_have_all_of_it() -> None:
    budget = AnswerBudget(100)
    budget.of(None).take(100)
    assert budget.used_bytes == 100


def test_shares_are_kept_as_long_as_somebody_counts_there() -> None:
    budget = AnswerBudget(100)
    share = budget.of(ALICE)
    share.take(40)
    gc.collect()
    assert budget.of(ALICE) is share
    share.adjust(-40)
    del share
    gc.collect()
    assert not budget._shares and not budget._used


def test_who_exceeds() -> None:
    budget = AnswerBudget(100)
    alice, bob = budget.of(ALICE), budget.of(BOB)

    def exceeded() -> tuple[bool, bool, bool]:
        return alice.is_exceeded, bob.is_exceeded, budget.is_exceeded

    alice.adjust(50)
    assert exceeded() == (True, False, False)
    bob.adjust(20)
    alice.adjust(40)
    assert exceeded() == (True, False, True), "bob has less than an equal part"
    bob.adjust(30)
    assert exceeded() == (True, True, True)


def test_large_answers_count_as_often_as_they_are_in_memory() -> None:
    assert in_memory(4096) == 4096
    assert in_memory(64 << 20) == COPIES * (64 << 20)
