"""Records in a journal: what they leave, and which do not fit."""

from __future__ import annotations

import pytest

from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Record,
    TokensAppended,
)
from service.journal.base import Journal, JournalConflict
from service.journal.memory import MemoryJournal


@pytest.fixture
def journal() -> Journal:
    """One cache, `a`, of the tokens 1, 2, 3, computed by epoch 5."""
    journal = MemoryJournal()
    journal.append((CacheCreated("a", seed=1, lease_s=10.0), appended("a", 0, 1, 2, 3)))
    return journal


def appended(cache_id: str, position: int, *token_ids: int, epoch: int = 5) -> TokensAppended:
    return TokensAppended(cache_id, position, token_ids, prompt_len=0, epoch=epoch)


def test_appends_follow_one_another(journal: Journal) -> None:
    journal.append((appended("a", 3, 4), appended("a", 4, 5, epoch=6)))
    assert list(journal.token_ids("a")) == [1, 2, 3, 4, 5]


def test_the_tokens_are_a_copy(journal: Journal) -> None:
    tokens = journal.token_ids("a")
    journal.append((CacheTruncated("a", 1),))
    assert list(tokens) == [1, 2, 3]


def test_a_fork_goes_its_own_way(journal: Journal) -> None:
    journal.append((CacheForked("b", "a", seed=2, lease_s=10.0), appended("b", 3, 9), CacheTruncated("a", 1)))
    assert list(journal.token_ids("a")) == [1]
    assert list(journal.token_ids("b")) == [1, 2, 3, 9]
    assert len(journal) == 2


def test_a_released_cache_is_forgotten(journal: Journal) -> None:
    journal.append((CacheReleased("a"),))
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
        CacheCreated("a", seed=1, lease_s=10.0),
        CacheForked("a", "a", seed=1, lease_s=10.0),
        CacheForked("b", "unknown", seed=1, lease_s=10.0),
        CacheTruncated("a", 4),
        CacheTruncated("unknown", 0),
        CacheReleased("unknown"),
    ],
)
def test_a_record_that_does_not_fit_changes_nothing(journal: Journal, record: Record) -> None:
    with pytest.raises(JournalConflict):
        journal.append((record,))
    assert list(journal.token_ids("a")) == [1, 2, 3] and len(journal) == 1
