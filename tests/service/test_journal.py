"""Records in a journal: what they leave, and which do not fit."""

from __future__ import annotations

import random

import pytest
from service.journal.chunks import CHUNK_TOKENS

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


def test_forks_share_their_tokens() -> None:
    """A thousand forks of a long cache take hardly more than the one, and what each adds is its own."""
    journal, long = MemoryJournal(), list(range(30_000))
    journal.append((CacheCreated("a", seed=1, lease_s=10.0), appended("a", 0, *long)))
    one = journal.size_bytes
    forks = [f"f{index}" for index in range(1024)]
    journal.append([CacheForked(name, "a", seed=1, lease_s=10.0) for name in forks])
    assert 4 * len(long) < one and journal.size_bytes < 20 * one
    journal.append([appended(name, len(long), index) for index, name in enumerate(forks)])
    assert list(journal.token_ids("a")) == long
    assert list(journal.token_ids("f7")) == [*long, 7]
    journal.append([CacheReleased(name) for name in ("a", *forks)])
    assert journal.size_bytes == 0


@pytest.mark.parametrize("seed", range(20))
def test_whatever_caches_share_each_has_its_own_tokens(seed: int) -> None:
    rng = random.Random(seed)
    journal = MemoryJournal()
    truth: dict[str, list[int]] = {}
    for index in range(400):
        name = rng.choice([*truth, ""])
        match rng.choice(("create", "append", "append", "fork", "truncate", "release")):
            case "create":
                truth[f"c{index}"] = []
                journal.append((CacheCreated(f"c{index}", seed=1, lease_s=1.0),))
            case "append" if name:
                tokens = [rng.randrange(2**32) for _ in range(rng.choice((1, 3, CHUNK_TOKENS, 700)))]
                journal.append((appended(name, len(truth[name]), *tokens),))
                truth[name] += tokens
            case "fork" if name:
                truth[f"c{index}"] = list(truth[name])
                journal.append((CacheForked(f"c{index}", name, seed=1, lease_s=1.0),))
            case "truncate" if name:
                edge = rng.randrange(4) * CHUNK_TOKENS
                new_len = min(len(truth[name]), rng.choice((edge, rng.randint(0, 2000))))
                del truth[name][new_len:]
                journal.append((CacheTruncated(name, new_len),))
            case "release" if name and rng.random() < 0.5:
                del truth[name]
                journal.append((CacheReleased(name),))
    for name, tokens in truth.items():
        assert list(journal.token_ids(name)) == tokens
    journal.append([CacheReleased(name) for name in truth])
    assert journal.size_bytes == 0
