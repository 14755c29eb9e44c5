"""Random commits of caches, and what has to be recovered of them."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Collection, Sequence
from pathlib import Path

from service.caches.ledger import CacheState, Ledger
from service.caches.records import (
    CacheCreated,
    CacheForked,
    CacheReleased,
    CacheTruncated,
    Child,
    LeaseRenewed,
    Record,
    TokensAppended,
    ValueStored,
)
from service.journal.base import Journal
from service.journal.file_journal import FileJournal
from service.journal.segments import Sync
from service.journal.stored import COMPACTION_BYTES

# What a fork of the cache does not copy, and the placement, are facts, too.
FIELDS = [field.name for field in dataclasses.fields(CacheState) if not field.name.startswith("last_")]


def facts(ledger: Ledger) -> dict[int, object]:
    """The state of each cache; and the values, by 0, if there are any."""
    values: dict[int, object] = {0: dict(ledger.values)} if ledger.values else {}
    return values | {
        state.number: (
            *(getattr(state, name) for name in FIELDS if name != "tokens"),
            state.last,
            list(state.tokens.copy()),
        )
        for state in ledger
    }


def created(number: int, weights: int = 0) -> CacheCreated:
    return CacheCreated(number, f"cache-{number}", "tenant", b"salt", number, 60.0, "", weights)


def appended(number: int, position: int, *token_ids: int) -> TokensAppended:
    return TokensAppended(number, position, token_ids, prompt_len=1, ownership=2)


async def commit(journal: Journal, *records: Record, to: Ledger | None = None) -> bool:
    """Also applies them `to` a ledger."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def committed(ok: bool) -> None:
        if ok and to is not None:
            for record in records:
                to.apply(record)
        done.set_result(ok)

    journal.commit(records, committed)
    return await done


def open_journal(
    directory: Path,
    sync: Sync = "normal",
    compaction_bytes: int = COMPACTION_BYTES,
    ledger: Ledger | None = None,
) -> FileJournal:
    """Opens a journal on disk, and applies its records to the ledger."""
    found = Ledger() if ledger is None else ledger
    return FileJournal(
        directory,
        lambda record, _wall_s: found.apply(record),
        lambda run, _wall_s: found.apply_run(run),
        sync,
        compaction_bytes,
    )


def recovered(directory: Path) -> Ledger:
    """What the next gateway finds."""
    ledger = Ledger()
    open_journal(directory, ledger=ledger).close()
    return ledger


class Traffic:
    """Commits that fit the ledger, which the caller keeps up to date."""

    def __init__(self, seed: int, ledger: Ledger, prompt_tokens: int) -> None:
        self.rng = random.Random(seed)
        self._ledger = ledger
        self._prompt_tokens = prompt_tokens
        self._number = max((state.number for state in ledger), default=0)

    def next(self, busy: Collection[int] = ()) -> list[Record]:
        """Records of one commit, of caches that are not busy."""
        rng = self.rng
        states = [state for state in self._ledger if state.number not in busy]
        rng.shuffle(states)
        kind = rng.random()
        if not states or kind < 0.1:
            number = self._new_number()
            return [
                ValueStored(rng.choice("abc"), rng.randbytes(rng.randrange(3))),
                created(number, weights=number % 3),
                appended(number, 0, *self._tokens(rng.randint(1, self._prompt_tokens))),
            ]
        state = states[0]
        if kind < 0.6:
            # A batch, some with more than one token.
            return [appended(s.number, s.length, *self._tokens(rng.choice((1, 1, 1, 3)))) for s in states[:8]]
        if kind < 0.75:
            children = [
                Child(self._new_number(), "child", rng.randrange(9)) for _ in range(rng.randint(1, 3))
            ]
            return [CacheForked(state.number, children, "again")]
        if kind < 0.8:
            return [LeaseRenewed(state.number, rng.random())]
        if kind < 0.9 or len(states) < 3:
            return [CacheTruncated(state.number, rng.randint(0, state.length))]
        return [CacheReleased(state.number)]

    def _new_number(self) -> int:
        self._number += 1
        return self._number

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(1000), k=count)


def caches_of(records: Sequence[Record]) -> list[int]:
    """The caches that records create, change or fork."""
    numbers = []
    for record in records:
        if isinstance(record, CacheForked):
            numbers += [record.parent, *(child.number for child in record.children)]
        elif not isinstance(record, ValueStored):
            numbers.append(record.number)
    return numbers
