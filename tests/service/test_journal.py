"""Records in a journal: what they leave, and which do not fit."""

from __future__ import annotations

import pytest

from service.journal.base import (
    Appended,
    Created,
    Forked,
    Journal,
    JournalConflict,
    Record,
    Released,
    Truncated,
)
from service.journal.memory import MemoryJournal


@pytest.fixture
def journal() -> Journal:
    """One cache, `a`, of the tokens 1, 2, 3, computed by epoch 5."""
    journal = MemoryJournal()
    journal.append((Created("a", seed=1, lease_s=10.0), appended("a", 0, 1, 2, 3)))
    return journal


def appended(cache_id: str, position: int, *token_ids: int, epoch: int = 5) -> Appended:
    return Appended(cache_id, position, token_ids, prompt_len=0, epoch=epoch)


def test_appends_follow_one_another(journal: Journal) -> None:
    journal.append((appended("a", 3, 4), appended("a", 4, 5, epoch=6)))
    assert list(journal.token_ids("a")) == [1, 2, 3, 4, 5]


def test_the_tokens_are_a_copy(journal: Journal) -> None:
    tokens = journal.token_ids("a")
    journal.append((Truncated("a", 1),))
    assert list(tokens) == [1, 2, 3]


def test_a_fork_goes_its_own_way(journal: Journal) -> None:
    journal.append((Forked("b", "a", seed=2, lease_s=10.0), appended("b", 3, 9), Truncated("a", 1)))
    assert list(journal.token_ids("a")) == [1]
    assert list(journal.token_ids("b")) == [1, 2, 3, 9]
    assert len(journal) == 2


def test_a_released_cache_is_forgotten(journal: Journal) -> None:
    journal.append((Released("a"),))
    assert len(journal) == 0
    with pytest.raises(KeyError):
        journal.token_ids("a")


def test_every_uint32_is_a_token(journal: Journal) -> None:
    journal.append((appended("a", 3, 2**32 - 1),))
    assert list(journal.token_ids("a"))[3] == 2**32 - 1


@pytest.mark.parametrize(
    "record",
    [
        appended("a", 2, 9),
        appended("a", 4, 9),
        appended("a", 3, 9, epoch=4),
        appended("unknown", 0, 9),
        Created("a", seed=1, lease_s=10.0),
        Forked("a", "a", seed=1, lease_s=10.0),
        Forked("b", "unknown", seed=1, lease_s=10.0),
        Truncated("a", 4),
        Truncated("unknown", 0),
        Released("unknown"),
    ],
)
def test_a_record_that_does_not_fit_changes_nothing(journal: Journal, record: Record) -> None:
    with pytest.raises(JournalConflict):
        journal.append((record,))
    assert list(journal.token_ids("a")) == [1, 2, 3] and len(journal) == 1
