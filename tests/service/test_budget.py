"""Memory for answers: how it is counted, and how tenants share it."""

from __future__ import annotations

import gc

import pytest

from service.api.budget import COPIES, AnswerBudget, in_memory
from service.caches.tenants import Tenant
from service.errors import AnswersFull

ALICE, BOB = Tenant("alice"), Tenant("bob")


def test_a_tenant_has_half_at_most() -> None:
    budget = AnswerBudget(100)
    budget.of(ALICE).take(50)
    with pytest.raises(AnswersFull) as refused:
        budget.of(ALICE).take(1)
    assert refused.value.metadata == {"limit_bytes": "50"}
    budget.of(BOB).take(50)
    with pytest.raises(AnswersFull):
        budget.of(Tenant("carol")).take(1)
    budget.of(ALICE).adjust(-20)
    assert (budget.used_bytes, budget.of(ALICE).used_bytes) == (80, 30)
    budget.of(ALICE).take(20)


def test_one_answer_is_always_admitted() -> None:
    budget = AnswerBudget(100)
    budget.of(ALICE).take(1000)
    assert budget.used_bytes == 1000
    with pytest.raises(AnswersFull):
        budget.of(BOB).take(10)
    assert budget.of(BOB).used_bytes == 0, "what is refused counts nowhere"
    budget.of(ALICE).adjust(-1000)
    budget.of(BOB).take(1000)


def test_callers_without_a_tenant_have_all_of_it() -> None:
    budget = AnswerBudget(100)
    budget.of(None).take(100)
    assert budget.used_bytes == 100


def test_shares_are_kept_as_long_as_somebody_counts_there() -> None:
    budget = AnswerBudget(100)
    share = budget.of(ALICE)
    share.take(50)
    gc.collect()
    assert budget.of(ALICE) is share
    share.adjust(-50)
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
