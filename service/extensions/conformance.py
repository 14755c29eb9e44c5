"""Tests that every journal has to pass, for pytest: a subclass says how its journal is opened.

    class TestMyJournal(JournalConformance):
        async def open(self, directory, apply):
            return await open_journal(Config(journal="mine://..."), directory, apply)

Quire's own journals, in files and in PostgreSQL, run the same tests (tests/service/test_journal_faults.py). A
process is killed in one of them, for which the module of the subclass has to be importable.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
from collections.abc import AsyncIterator, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import pytest

from service.caches.ledger import CacheState, Ledger, RecordConflict
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
from service.journal.base import Journal, JournalUnusable, OwnershipLost
from service.journal.recovery import Apply
from service.journal.values import StoredValues

# The longest time that a journal may take for something that it does by itself.
PATIENCE_S: Final = 60.0
# All fields that recovery must restore, except those of the last append: `CacheState.last` combines them.
_FIELDS: Final = [
    field.name for field in dataclasses.fields(CacheState) if not field.name.startswith("last_")
]


class Gateway:
    """The part of a gateway that uses its journal.

    Attributes:
        running: The journal's `run`.
    """

    def __init__(self, journal: Journal, ledger: Ledger) -> None:
        """Must be called in an event loop."""
        self.journal = journal
        self.ledger = ledger
        journal.bind_ledger(ledger)
        self.running = asyncio.create_task(journal.run())

    async def commit(self, *records: Record) -> bool:
        """Commits records, and applies them to the ledger if they are durable. Returns whether they are."""
        return await commit(self.journal, *records, to=self.ledger)


async def commit(journal: Journal, *records: Record, to: Ledger | None = None) -> bool:
    """Commits records, and applies them `to` a ledger if they are durable. Returns whether they are."""
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def committed(ok: bool) -> None:
        try:
            if ok and to is not None:
                for record in records:
                    to.apply(record)
        except RecordConflict as error:
            done.set_exception(error)
        else:
            done.set_result(ok)

    journal.commit(records, committed)
    return await done


class JournalConformance:
    """A commit reported as durable is found by the next gateway; one reported as failed is not there.

    `directory` is new for each test, and each directory has a journal of its own. A journal that is stored
    elsewhere can derive its name from the whole path: the next run may have directories of the same names.
    """

    async def open(self, directory: Path, apply: Apply) -> Journal:
        """Opens a journal, and applies its records. Raises JournalUnusable while it is another gateway's."""
        raise NotImplementedError

    async def end_lease(self, directory: Path) -> None:
        """Expires the lease of the gateway that has the journal, so that another one can take it over.

        Without leases there is nothing to do: a lock is held until its process ends.
        """

    def break_connections(self, _directory: Path) -> None:
        """Breaks all connections to the journal's storage, maybe between a request and its reply."""
        pytest.skip("the journal has no connections")

    @contextlib.asynccontextmanager
    async def gateway(self, directory: Path) -> AsyncIterator[Gateway]:
        """A gateway that shuts down cleanly. Raises JournalUnusable."""
        ledger = Ledger()
        journal = await self.open(directory, lambda record, _wall_s: ledger.apply(record))
        gateway = Gateway(journal, ledger)
        # Gives `run` a turn, so that it is cancelled after its start.
        await asyncio.sleep(0)
        try:
            yield gateway
        finally:
            gateway.running.cancel()
            await asyncio.wait({gateway.running})
            journal.close()

    async def recovered(self, directory: Path) -> Ledger:
        """The ledger that the next gateway recovers. Raises JournalUnusable."""
        async with self.gateway(directory) as gateway:
            return gateway.ledger

    def test_commits_are_recovered(self, tmp_path: Path) -> None:
        """Three gateways commit, one after the other."""

        async def test() -> None:
            expected: dict[int, object] = {}
            for seed in range(3):
                async with self.gateway(tmp_path) as gateway:
                    assert facts(gateway.ledger) == expected
                    traffic = Traffic(seed, gateway.ledger, prompt_tokens=20)
                    for _ in range(100):
                        assert await gateway.commit(*traffic.next())
                        await asyncio.sleep(0.001)
                    expected = facts(gateway.ledger)
            assert facts(await self.recovered(tmp_path)) == expected

        asyncio.run(test())

    def test_commits_are_told_once_and_in_order(self, tmp_path: Path) -> None:
        """Even if they are committed before earlier ones are durable."""
        count = 300
        told: list[tuple[int, bool]] = []

        async def test() -> None:
            async with self.gateway(tmp_path) as gateway:
                assert await gateway.commit(*(created(number) for number in range(count)))
                last: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                for number in range(count):
                    gateway.journal.commit(
                        [CacheReleased(number)],
                        lambda ok, number=number: told.append((number, ok)),  # type: ignore[misc]
                    )
                gateway.journal.commit([], last.set_result)
                assert await asyncio.wait_for(last, PATIENCE_S)
                assert told == [(number, True) for number in range(count)]
            assert not len(await self.recovered(tmp_path))

        asyncio.run(test())

    def test_the_last_value_of_each_name_is_recovered(self, tmp_path: Path) -> None:
        """Extensions keep values for the next gateway."""

        async def test() -> None:
            async with self.gateway(tmp_path) as gateway:
                values = StoredValues(gateway.journal, gateway.ledger)
                await values.set({"a": b"1", "b": b"2", "c": b"3"})
                values.put("a", b"4")
                await values.set({"b": b""})
                assert await gateway.commit(created(1)) and await gateway.commit(CacheReleased(1))
                await asyncio.sleep(0.1)
            ledger = await self.recovered(tmp_path)
            assert ledger.values == {"a": b"4", "c": b"3"} and not len(ledger)

        asyncio.run(test())

    def test_a_commit_that_cannot_be_encoded_fails_alone(self, tmp_path: Path) -> None:
        """The failure is reported and not raised: the gateway continues."""
        told: list[bool] = []

        async def test() -> None:
            async with self.gateway(tmp_path) as gateway:
                gateway.journal.commit([CacheReleased(-1)], told.append)
                assert await gateway.commit(created(1))
                assert told == [False]
            assert len(await self.recovered(tmp_path)) == 1

        asyncio.run(test())

    def test_of_two_gateways_one_can_commit(self, tmp_path: Path) -> None:
        """A second gateway is refused; or it takes the journal, and then the first can never commit again."""

        async def test() -> None:
            async with self.gateway(tmp_path) as first:
                assert await first.commit(created(1))
                await self.end_lease(tmp_path)
                try:
                    async with self.gateway(tmp_path) as second:
                        assert await second.commit(appended(1, 0, 7))
                        late = asyncio.create_task(first.commit(appended(1, 0, 8)))
                        await asyncio.wait({first.running}, timeout=PATIENCE_S)
                        assert first.running.done(), "the first gateway goes on"
                        assert isinstance(first.running.exception(), OwnershipLost)
                        assert not (late.done() and late.result())
                        late.cancel()
                        assert await second.commit(appended(1, 1, 7))
                        expected = facts(second.ledger)
                except JournalUnusable:
                    assert await first.commit(appended(1, 0, 7))
                    expected = facts(first.ledger)
            assert facts(await self.recovered(tmp_path)) == expected

        asyncio.run(test())

    def test_a_kill_loses_nothing_that_was_told(self, tmp_path: Path) -> None:
        """A gateway commits one token after the other, and is killed."""
        spawn = multiprocessing.get_context("spawn")
        receiver, sender = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_append_for_ever, args=(self, tmp_path, sender))
        process.start()
        sender.close()
        told = 0
        with contextlib.suppress(EOFError):
            while True:
                assert receiver.poll(PATIENCE_S), f"no commit after {told} of them"
                told = receiver.recv()
                if told == 50:
                    process.kill()
        process.join()
        assert told >= 50, "the process has failed"

        async def test() -> None:
            await self.end_lease(tmp_path)
            (state,) = await self.recovered(tmp_path)
            # The last one may have become durable before it was reported.
            assert told <= state.length <= told + 1
            assert list(state.tokens.copy()) == list(range(state.length))

        asyncio.run(test())

    def test_a_lost_reply_is_no_failure(self, tmp_path: Path) -> None:
        """If the reply is lost, the commit may be stored. The journal finds out, and then reports it."""

        async def test() -> None:
            async with self.gateway(tmp_path) as gateway:
                assert await gateway.commit(created(1))
                for token in range(100):
                    position = next(iter(gateway.ledger)).length
                    under_way = asyncio.create_task(gateway.commit(appended(1, position, token)))
                    await asyncio.sleep(0.0005 * (token % 10))
                    self.break_connections(tmp_path)
                    # An unknown outcome is no failure: the next commit would be stored at the same position.
                    await asyncio.wait({under_way, gateway.running}, return_when=asyncio.FIRST_COMPLETED)
                    assert under_way.done(), "it is the only gateway"
                expected = facts(gateway.ledger)
            assert facts(await self.recovered(tmp_path)) == expected

        asyncio.run(test())


def _append_for_ever(tests: JournalConformance, directory: Path, told: Connection) -> None:
    """Sends the length of a cache after each durable token."""

    async def append() -> None:
        async with tests.gateway(directory) as gateway:
            assert await gateway.commit(created(1))
            position = 0
            while await gateway.commit(appended(1, position, position)):
                position += 1
                told.send(position)

    asyncio.run(append())


# The records that are committed, and the state that has to be recovered from them.


def facts(ledger: Ledger) -> dict[int, object]:
    """The state of each cache by its number; and under 0 the values, if there are any."""
    values: dict[int, object] = {0: dict(ledger.values)} if ledger.values else {}
    return values | {
        state.number: (
            *(getattr(state, name) for name in _FIELDS if name != "tokens"),
            state.last,
            list(state.tokens.copy()),
        )
        for state in ledger
    }


def created(number: int, weights: int = 0) -> CacheCreated:
    """The record of a new cache."""
    return CacheCreated(number, f"cache-{number}", "tenant", b"salt", number, 60.0, "", weights)


def appended(number: int, position: int, *token_ids: int) -> TokensAppended:
    """The record of tokens appended to a cache."""
    return TokensAppended(number, position, token_ids, prompt_len=1, ownership=2)


class Traffic:
    """Generates commits that are valid for the ledger, which the caller keeps up to date."""

    def __init__(self, seed: int, ledger: Ledger, prompt_tokens: int) -> None:
        """`prompt_tokens`: the most tokens of the first append of a cache."""
        self.rng = random.Random(seed)
        self._ledger = ledger
        self._prompt_tokens = prompt_tokens
        self._number = max((state.number for state in ledger), default=0)

    def next(self, busy: Collection[int] = ()) -> list[Record]:
        """The records of one commit, for caches that are not `busy`."""
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
