"""What records leave of caches, and which do not fit."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest

from service.caches.ledger import Ledger, RecordConflict
from service.caches.records import CacheForked, CacheReleased, CacheTruncated, Child, Record
from service.caches.segments import SEGMENT_TOKENS
from service.extensions.conformance import appended, created
from service.journal.encoding import Frame, encode
from service.journal.recovery import Recovery


@pytest.fixture
def ledger() -> Ledger:
    """One cache, number 1, of the tokens 1, 2, 3, computed by owner 2."""
    ledger = Ledger()
    apply(ledger, created(1), appended(1, 0, 1, 2, 3))
    return ledger


def apply(ledger: Ledger, *records: Record) -> None:
    for record in records:
        ledger.apply(record)


def forked(parent: int, *numbers: int) -> CacheForked:
    return CacheForked(parent, [Child(number, f"c{number}", seed=2) for number in numbers], "")


def tokens(ledger: Ledger, number: int) -> list[int]:
    state = ledger.get(number)
    assert state is not None
    return list(state.tokens.copy())


@pytest.mark.parametrize("decoded", [(7,), (7, 8, 9)])
def test_appends_that_are_merged_leave_what_each_of_them_does(ledger: Ledger, decoded: Sequence[int]) -> None:
    one_by_one = Ledger()
    decodes = [appended(1, 3 + index, token) for index, token in enumerate(decoded)]
    apply(one_by_one, created(1), appended(1, 0, 1, 2, 3), *decodes)
    recovery = Recovery(lambda record, _wall_s: ledger.apply(record))
    for number, one in enumerate(decodes):
        recovery.add(Frame(number, 0, encode([one]), 0))
    recovery.end()
    (found,), (expected,) = ledger, one_by_one
    assert (list(found.tokens.copy()), found.last) == (list(expected.tokens.copy()), expected.last)


@pytest.mark.parametrize(
    "record",
    [
        appended(1, 2, 9),
        appended(1, 4, 9),
        dataclasses.replace(appended(1, 3, 9), ownership=1),
        appended(7, 0, 9),
        created(1),
        forked(1, 1),
        forked(1, 2, 1),
        forked(7, 2),
        CacheTruncated(1, 4),
        CacheTruncated(7, 0),
        CacheReleased(7),
    ],
)
def test_a_record_that_does_not_fit_changes_nothing(ledger: Ledger, record: Record) -> None:
    with pytest.raises(RecordConflict):
        apply(ledger, record)
    assert tokens(ledger, 1) == [1, 2, 3] and len(ledger) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_caches_share_each_has_its_own_tokens(seed: int) -> None:
    rng, ledger = random.Random(seed), Ledger()
    truth: dict[int, list[int]] = {}
    for new in range(1, 401):
        number = rng.choice([*truth, 0])
        match rng.choice(("create", "append", "append", "fork", "truncate", "release")):
            case "create":
                truth[new] = []
                apply(ledger, created(new))
            case "append" if number:
                token_ids = [rng.randrange(2**32) for _ in range(rng.choice((1, 3, SEGMENT_TOKENS, 700)))]
                apply(ledger, appended(number, len(truth[number]), *token_ids))
                truth[number] += token_ids
            case "fork" if number:
                truth[new] = list(truth[number])
                apply(ledger, forked(number, new))
            case "truncate" if number:
                edge = rng.randrange(4) * SEGMENT_TOKENS
                new_len = min(len(truth[number]), rng.choice((edge, rng.randint(0, 2000))))
                del truth[number][new_len:]
                apply(ledger, CacheTruncated(number, new_len))
            case "release" if number and rng.random() < 0.5:
                del truth[number]
                apply(ledger, CacheReleased(number))
    for number, token_ids in truth.items():
        assert tokens(ledger, number) == token_ids
    apply(ledger, *(CacheReleased(number) for number in truth))
    assert ledger.size_bytes == 0
