"""Planted bugs: in what caches are, what is written of them, and their order. Each public name is one."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, BinaryIO

import pytest

from service.caches.append import repeats_last
from service.caches.effects import AbortForward, ReleaseSequences
from service.caches.ledger import fingerprint
from service.caches.records import CacheCreated, CacheForked, Child, Record, TokensAppended
from service.caches.requests import Append, Appended, Fork, Request, Result, Truncate
from service.dispatcher import Dispatcher, OnOutcomes
from service.errors import QuireError
from service.journal import encoding
from service.journal.base import OnCommitted
from service.journal.encoding import Frame, decode, read_frames
from tests.forwards import Told
from tests.sim import disk
from tests.sim.disk import DiskJournal
from tests.sim.machine import PlantedMachine
from tests.sim.planted import begins_at, everywhere
from tests.sim.truth import Asked
from tests.sim.watched import LARGE_BYTES, WatchedDispatcher

# What is kept would show a bug at once; callers are to.
KEPT = "tests.sim.watched.check_ledger"
# No schedule has as many.
MANY_CACHES = 1000

# Fencing and repetitions.


class FencingOff(PlantedMachine):
    def on_request(self, request: Request, asked: Asked) -> Request:
        return (
            dataclasses.replace(request, position=None) if isinstance(request, Append | Truncate) else request
        )


def other_tokens_taken_for_a_repetition(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, repeats_last, lambda *_: True)


class RepetitionsNotRecognisedAfterARestart(PlantedMachine):
    silent = (KEPT,)

    def recovered(self, **times: Any) -> None:
        super().recovered(**times)
        for state in self.ledger:
            state.last_base = None


class RepetitionsAppliedOnceMoreAfterADeath(PlantedMachine):
    """What was computed again to be answered is written again."""

    def watch(self, *args: Any) -> None:
        super().watch(*args)
        self.died_with: set[int] = set()

    def worker_lost(self, worker_id: str, epoch: int, *args: Any, **how: Any) -> None:
        self.died_with |= {
            asked.number for asked, _ in self.computed_on(worker_id, epoch) if asked is not None
        }
        super().worker_lost(worker_id, epoch, *args, **how)

    def on_reply(self, asked: Asked, outcome: Result | QuireError) -> Result | QuireError | None:
        append = asked.request
        if not isinstance(append, Append) or not isinstance(outcome, Appended) or not outcome.cache_id:
            return outcome
        state = self.state_of(outcome.cache_id)
        if asked.records is None and asked.number in self.died_with and state is not None and state.last:
            kept = tuple(append.token_ids[: outcome.kept])
            again = TokensAppended(state.number, state.last.base, kept, state.prompt_len, outcome.epoch)
            self.written_instead(asked, (again,))
            return None
        return outcome


class _DecodesOfSeveral(PlantedMachine):
    """Something is wrong with what is written of decodes that were answered with those that follow."""

    silent = (KEPT,)

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        append = asked.request
        return [
            self.wrong(record, append)
            if isinstance(append, Append)
            and isinstance(record, TokensAppended)
            and len(record.token_ids) > len(append.token_ids)
            else record
            for record in records
        ]

    def wrong(self, record: TokensAppended, append: Append) -> TokensAppended:
        raise NotImplementedError


class OnlyTheFirstOfSeveralIsWritten(_DecodesOfSeveral):
    def wrong(self, record: TokensAppended, append: Append) -> TokensAppended:
        return dataclasses.replace(record, token_ids=record.token_ids[: len(append.token_ids)])


class TheFirstOfSeveralRepeatsAll(_DecodesOfSeveral):
    first_seed = 160  # See `AllAreQuarantined`.

    def wrong(self, record: TokensAppended, append: Append) -> TokensAppended:
        return dataclasses.replace(record, fingerprint=fingerprint(append.token_ids))


class _KeyIgnored(PlantedMachine):
    """A request id is written down, and not looked for: each request has another one to the machine."""

    silent = (KEPT,)
    of: type[Append | Fork]

    def on_request(self, request: Request, asked: Asked) -> Request:
        if isinstance(request, Append | Fork) and isinstance(request, self.of) and request.request_id:
            return dataclasses.replace(request, request_id=f"{request.request_id}#{asked.number}")
        return request

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        return [
            dataclasses.replace(record, request_id=record.request_id.partition("#")[0])
            if isinstance(record, CacheCreated | CacheForked)
            else record
            for record in records
        ]


class RequestIdsOfCreationsIgnored(_KeyIgnored):
    of = Append


class RequestIdsOfForksIgnored(_KeyIgnored):
    of = Fork


# The journal.


def answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    accept = DiskJournal.accept

    def at_once(journal: DiskJournal, records: Sequence[Record], on_committed: OnCommitted) -> None:
        accept(journal, records, lambda _: None)
        on_committed(True)

    patch.setattr(DiskJournal, "accept", at_once)


def failed_writes_taken_for_durable(patch: pytest.MonkeyPatch) -> None:
    accept = DiskJournal.accept

    def always(journal: DiskJournal, records: Sequence[Record], on_committed: OnCommitted) -> None:
        accept(journal, records, lambda _: on_committed(True))

    patch.setattr(DiskJournal, "accept", always)


def torn_frames_accepted(patch: pytest.MonkeyPatch) -> None:
    """What is there of the last frame is used."""
    head = encoding._HEAD.size

    def until_it_breaks(file: BinaryIO, end: int, seed: blake2b) -> Iterator[Frame]:
        frame_at = 0
        try:
            for frame in read_frames(file, end, seed):
                yield frame
                frame_at = frame.end
        except encoding.DamagedFrame:
            file.seek(frame_at)
            torn = file.read()
            if len(torn) > encoding.FRAME_BYTES:
                _, number, wall_ns = encoding._HEAD.unpack(torn[:head])
                yield Frame(number, wall_ns, torn[encoding.FRAME_BYTES :], end)

    def as_far_as_it_goes(payload: bytes) -> Iterator[Record]:
        with contextlib.suppress(encoding.UnknownRecord):
            yield from decode(payload)

    patch.setattr(disk, "read_frames", until_it_breaks)
    patch.setattr(disk, "decode", as_far_as_it_goes)


def checksums_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    class Same:
        def copy(self) -> Same:
            return self

        def update(self, _data: bytes) -> None:
            pass

        def digest(self) -> bytes:
            return bytes(8)

    patch.setattr(disk, "seed_of", lambda _identity: Same())


class RejectedDraftsWritten(PlantedMachine):
    """All drafts of a chain are written down, also those that were not accepted."""

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        append = asked.request
        if isinstance(append, Append) and append.accept and not append.parents:
            for record in records:
                if isinstance(record, TokensAppended):
                    object.__setattr__(record, "token_ids", append.token_ids)
        return records


class ATreeTakenForItsFirstTokens(PlantedMachine):
    """As many tokens as the path has are written down, but in the order of the request."""

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        append = asked.request
        for record in records:
            if isinstance(record, TokensAppended) and isinstance(append, Append) and append.parents:
                # Also in what the machine applies.
                in_order = append.token_ids[: len(record.token_ids)]
                object.__setattr__(record, "token_ids", in_order)
        return records


def _written_as(patch: pytest.MonkeyPatch, change: Callable[[Record], Record]) -> None:
    """Other records are written than those that are applied."""
    encode = encoding.encode
    patch.setattr(disk, "encode", lambda records: encode([change(record) for record in records]))
    patch.setattr(KEPT, lambda *_: None)


def weights_not_written_down(patch: pytest.MonkeyPatch) -> None:
    def of_the_first(record: Record) -> Record:
        return dataclasses.replace(record, weights=0) if isinstance(record, CacheCreated) else record

    _written_as(patch, of_the_first)


def adapters_not_written_down(patch: pytest.MonkeyPatch) -> None:
    def of_the_model_itself(record: Record) -> Record:
        return dataclasses.replace(record, adapter=0) if isinstance(record, CacheCreated) else record

    _written_as(patch, of_the_model_itself)


# Forks of several caches.


class ForksBeginAtTheirFirstTurn(PlantedMachine):
    """The machine knows of the first cache only; copies of the others are written with those of that."""

    first_seed = 500  # See `AllAreQuarantined`.

    def on_request(self, request: Request, asked: Asked) -> Request:
        if isinstance(request, Fork) and self.is_cut(asked):
            return dataclasses.replace(request, sources=request.sources[:1])
        return request

    def is_cut(self, asked: Asked) -> bool:
        fork, oracle = asked.request, self.oracle
        if not isinstance(fork, Fork) or len(fork.sources) == 1 or fork.request_id:
            return False
        if oracle.cache_limit < MANY_CACHES or oracle.budget.limit_bytes < LARGE_BYTES:
            # That the others are not counted would show.
            return False
        return all(s.position is None and self.state_of(s.cache_id) is not None for s in fork.sources)

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        fork = asked.request
        if not isinstance(fork, Fork) or not self.is_cut(asked):
            return records
        # Also what the machine applies.
        assert isinstance(records, list)
        for place, source in enumerate(fork.sources[1:], start=1):
            state = self.state_of(source.cache_id)
            if state is None or not source.count:
                continue
            first = asked.number * 100 + place * 10
            numbers = range(1_000_000_000 + first, 1_000_000_000 + first + source.count)
            children = tuple(Child(number, f"kv_{number}", 1) for number in numbers)
            records.insert(-len(fork.release) or len(records), CacheForked(state.number, children, ""))
        return records


class ForksOfSeveralAreCut(PlantedMachine):
    """Only the first parent's children are written."""

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record]:
        forked = [record for record in records if isinstance(record, CacheForked)]
        return [record for record in records if record not in forked[1:]]


class ForksAreNotFenced(PlantedMachine):
    def on_request(self, request: Request, asked: Asked) -> Request:
        if not isinstance(request, Fork):
            return request
        sources = [dataclasses.replace(source, position=None) for source in request.sources]
        return dataclasses.replace(request, sources=sources)


# Order, and what is left behind.


def _in_another_order(patch: pytest.MonkeyPatch, key: Callable[[tuple[int, Request]], int]) -> None:
    """What comes together is handed over in another order."""
    start = Dispatcher.start

    def reordered(
        dispatcher: WatchedDispatcher, requests: Sequence[Request], on_outcomes: OnOutcomes, *whose: Any
    ) -> list[int]:
        order = [index for index, _ in sorted(enumerate(requests), key=key)]
        upcoming = dispatcher.machine.upcoming
        asked = list(upcoming)
        upcoming.clear()
        upcoming.extend(asked[index] for index in order)
        tickets = start(
            dispatcher,
            [requests[index] for index in order],
            lambda found: on_outcomes([(order[place], outcome) for place, outcome in found]),
            *whose,
        )
        return [ticket for _, ticket in sorted(zip(order, tickets, strict=True))]

    patch.setattr(Dispatcher, "start", reordered)


def order_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The last comes first."""
    _in_another_order(patch, lambda at: -at[0])


@begins_at(240)
def places_in_a_fork_not_written_down(patch: pytest.MonkeyPatch) -> None:
    def placeless(record: Record) -> Record:
        return dataclasses.replace(record, total=0, first=0) if isinstance(record, CacheForked) else record

    _written_as(patch, placeless)


class NothingAborted(PlantedMachine):
    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        return () if isinstance(command, AbortForward) else (command,)


class NothingReleased(PlantedMachine):
    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        return () if isinstance(command, ReleaseSequences) else (command,)


class SentTwice(PlantedMachine):
    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        return (command,) * (1 + (command.op_id % 8 == 0))


def cancelled_are_answered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Dispatcher, "cancel", lambda *_: None)


class TenantsKeepWhatTheyHad(PlantedMachine):
    """What an append reserved stays reserved when it is there."""

    silent = ("tests.sim.watched.check_invariants",)

    def on_reply(self, asked: Asked, outcome: Result | QuireError) -> Result | QuireError:
        if isinstance(asked.request, Append) and isinstance(outcome, Appended) and asked.tenant.name:
            asked.tenant.tokens += len(asked.request.token_ids)
        return outcome
