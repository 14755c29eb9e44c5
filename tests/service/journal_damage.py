"""What other programs do to a journal, and the tests of those that notice it. A row is a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from service.extensions.conformance import PATIENCE_S, JournalConformance, appended, created, facts
from service.journal.base import JournalUnusable, OwnershipLost

# A journal's frames or rows by their numbers, from 1, and what another program makes of them.
Rows = dict[int, bytes]
Change = Callable[[Rows], Rows]

# The third row is in the middle of six.


def first_missing(rows: Rows) -> Rows:
    """Without the first one."""
    return {number: row for number, row in rows.items() if number != 1}


def one_missing(rows: Rows) -> Rows:
    """Without the third one."""
    return {number: row for number, row in rows.items() if number != 3}


def last_missing(rows: Rows) -> Rows:
    """Without the last one."""
    return {number: row for number, row in rows.items() if number != max(rows)}


def all_missing(_rows: Rows) -> Rows:
    """Nothing is left."""
    return {}


def older_copy(rows: Rows) -> Rows:
    """As after two commits."""
    return {number: row for number, row in rows.items() if number <= 2}


def one_changed(rows: Rows) -> Rows:
    """A bit of the third one is another."""
    return rows | {3: _flipped(rows[3])}


def last_changed(rows: Rows) -> Rows:
    """A bit of the last one is another."""
    return rows | {max(rows): _flipped(rows[max(rows)])}


def last_cut(rows: Rows) -> Rows:
    """The end of the last one is missing."""
    return rows | {max(rows): rows[max(rows)][:-5]}


def exchanged(rows: Rows) -> Rows:
    """The third and the fourth one have changed their places."""
    return rows | {3: rows[4], 4: rows[3]}


def one_repeated(rows: Rows) -> Rows:
    """The second one is in the place of the third."""
    return rows | {3: rows[2]}


def _flipped(row: bytes) -> bytes:
    return row[:-1] + bytes([row[-1] ^ 1])


class JournalDamage(JournalConformance):
    """For journals that notice what other programs do to their rows: checksums, numbers, and a known end."""

    # What the message of a refusal has, for a frame of that number.
    refusal = r""

    async def change(self, directory: Path, change: Change) -> None:
        """Changes rows, as another program can, also under a running gateway. A row is a commit."""
        raise NotImplementedError

    async def filled(self, directory: Path) -> dict[int, object]:
        """Six rows of one cache."""
        async with self.gateway(directory) as gateway:
            assert await gateway.commit(created(1))
            for position in range(5):
                assert await gateway.commit(appended(1, position, 7))
            return facts(gateway.ledger)

    @pytest.mark.parametrize(
        ("change", "number"),
        [
            (first_missing, 1),
            (one_missing, 3),
            (one_changed, 3),
            (exchanged, 3),
            (one_repeated, 3),
            (last_changed, 6),
            (last_cut, 6),
        ],
    )
    def test_a_changed_journal_is_refused(self, tmp_path: Path, change: Change, number: int) -> None:
        """At each start. When it is restored, all is there."""
        good: Rows = {}

        def spoil(rows: Rows) -> Rows:
            good.update(rows)
            return change(rows)

        async def test() -> None:
            expected = await self.filled(tmp_path)
            await self.change(tmp_path, spoil)
            for _ in range(2):
                with pytest.raises(JournalUnusable, match=self.refusal.format(number=number)):
                    await self.recovered(tmp_path)
            await self.change(tmp_path, lambda _: good)
            assert facts(await self.recovered(tmp_path)) == expected

        asyncio.run(test())

    @pytest.mark.parametrize("change", [last_missing, all_missing, older_copy])
    def test_nothing_is_durable_behind_rows_that_were_lost(self, tmp_path: Path, change: Change) -> None:
        """It would be lost with them. The gateway ends, since what it knows is not what is stored."""

        async def test() -> None:
            async with self.gateway(tmp_path) as gateway:
                assert await gateway.commit(created(1))
                for position in range(5):
                    assert await gateway.commit(appended(1, position, 7))
                await self.change(tmp_path, change)
                for position in (5, 6, 7):
                    assert not await gateway.commit(appended(1, position, 7))
                with pytest.raises(OwnershipLost):
                    await asyncio.wait_for(gateway.running, PATIENCE_S)

        asyncio.run(test())
