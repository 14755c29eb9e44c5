"""The dispatcher and the journal, with the oracle at every door of theirs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.v1 import worker_pb2

from service.caches.effects import Command, Event, ForwardSequence
from service.caches.placement import WorkerView
from service.caches.records import Record
from service.caches.requests import Release, Renew, Request
from service.caches.table import CacheTable
from service.caches.tenants import Tenant
from service.dispatcher import Dispatcher, OnOutcome, Outcome, SendCommand
from service.journal.memory import MemoryJournal
from tests.sim.journal_bytes import NeededBytes
from tests.sim.model_worker import ModelWorker
from tests.sim.oracle import Oracle

# Small, so that short sequences have several chunks, full and begun.
CHUNK_TOKENS = 4
# No schedule fills that.
LARGE_BYTES = 1 << 28


class WatchedJournal(MemoryJournal):
    """Tells `on_record` of each record as it is written."""

    def __init__(self) -> None:
        super().__init__(CHUNK_TOKENS)
        self.needed = NeededBytes(CHUNK_TOKENS)
        self.on_record: Callable[[Record], None] = lambda _: None

    def append(self, records: Sequence[Record]) -> None:
        super().append(records)
        for record in records:
            self.needed.written(record)
            self.on_record(record)

    def check_bytes(self) -> None:
        """Asserts that it takes what its caches need, and no more."""
        assert self.size_bytes == self.needed.of(self._entries)


class WatchedDispatcher(Dispatcher):
    """Tells the oracle what comes in, and has it check what comes out."""

    def __init__(
        self,
        table: CacheTable,
        journal: WatchedJournal,
        send: SendCommand,
        clock_s: Callable[[], float],
        oracle: Oracle,
    ) -> None:
        super().__init__(table, journal, self._on_send, clock_s)
        self.table = table
        self.journal = journal
        self.oracle = oracle
        self.trace: deque[object] = deque(maxlen=60)
        # Of the present turn: effects carried out, and caches written about.
        self.effects = 0
        self._touched: set[str] = set()
        # Whose each request is, by number.
        self.callers: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._send_on = send
        # Counting takes time: done in each turn only where it may run out.
        self._counts_bytes = oracle.budget.limit_bytes < LARGE_BYTES
        journal.on_record = self._on_record

    # What comes in.

    def start(
        self, requests: Sequence[Request], on_outcome: OnOutcome, caller: int, tenant: Tenant | None = None
    ) -> list[int]:
        oracle = self.oracle
        oracle.budget.taken_bytes = self.journal.size_bytes
        numbers = [oracle.submitted(request) for request in requests]
        self.callers.update((number, caller) for number in numbers)

        def replied(index: int, outcome: Outcome) -> None:
            self.trace.append(("->", numbers[index], outcome))
            self.effects += 1
            oracle.replied(numbers[index], outcome)
            on_outcome(index, outcome)

        with self._turn("submit"):
            self.trace.extend(zip(numbers, requests, strict=True))
            tickets = super().start(requests, replied, caller, tenant)
            oracle.tickets.update(zip(numbers, tickets, strict=True))
            self._numbers.update(zip(tickets, numbers, strict=True))
            oracle.budget.admitted(oracle.outstanding, numbers)
        return tickets

    def cancel(self, tickets: Iterable[int]) -> None:
        oracle, tickets = self.oracle, list(tickets)
        asked = sorted(self._numbers[ticket] for ticket in tickets)
        numbers = [n for n in asked if n in oracle.outstanding and n not in oracle.abandoned]
        for number in numbers:
            oracle.cancelled(number)
        with self._turn("cancel", *numbers):
            super().cancel(tickets)

    def expire(self, at_most: int | None = None) -> int:
        oracle, before = self.oracle, len(self.oracle.caches)
        with self._turn("expire"):
            expired = super().expire(at_most)
        assert len(oracle.caches) == before - expired
        busy = {id(oracle.cache_of(r)) for r in oracle.outstanding.values()}
        for _, handle in self.handles():
            used = id(oracle.caches[handle.cache_id]) in busy
            assert used or handle.expires_at_s > oracle.now_s, "what ran out is released"
        return expired

    def worker_ready(self, worker: WorkerView) -> None:
        self.oracle.ready_epochs.add(worker.epoch)
        with self._turn("worker ready", worker.worker_id):
            super().worker_ready(worker)

    def worker_lost(self, worker_id: str, epoch: int) -> None:
        self.oracle.ready_epochs.discard(epoch)
        self.oracle.worker_lost(epoch)
        with self._turn("worker lost", worker_id):
            super().worker_lost(worker_id, epoch)

    def worker_answered(
        self, worker_id: str, epoch: int, events: Iterable[Event], pages_available: int
    ) -> None:
        events = list(events)
        with self._turn("deliver", *(event.op_id for event in events)):
            super().worker_answered(worker_id, epoch, events, pages_available)

    def start_draining(self) -> None:
        super().start_draining()
        self.oracle.draining = True

    # What comes out.

    def expect(self, worker: ModelWorker, command: Command) -> None:
        """Tells a worker what the journal says a forward must find there."""
        operation = self.table._operations.get(command.op_id)
        if isinstance(command, ForwardSequence) and operation is not None:
            entry = operation.entry
            tokens = self.journal.token_ids(entry.cache_id) if entry.visible else ()
            assert command.position <= len(tokens)
            worker.expected[command.op_id] = tokens[: command.position]

    def take_answers(self, worker: ModelWorker, count: int) -> worker_pb2.ConnectResponse:
        """The next message of a worker, with so many answers. The oracle learns of its failures."""
        events = [worker.outbox.popleft() for _ in range(min(count, len(worker.outbox)))]
        for event in events:
            if event.WhichOneof("event") == "error":
                failure = (event.error.reason, event.op_id in worker.excused)
                self.oracle.worker_failures[event.op_id] = failure
        return worker_pb2.ConnectResponse(events=events, pages_available=worker.pages_left)

    def _on_send(self, worker_id: str, epoch: int, command: Command) -> None:
        self.effects += 1
        self._send_on(worker_id, epoch, command)

    def _on_record(self, record: Record) -> None:
        self.effects += 1
        self._touched.add(record.cache_id)
        self.oracle.written(record)

    @contextlib.contextmanager
    def _turn(self, cause: str, *of: object) -> Iterator[None]:
        """One input, all effects of which have been carried out at its end."""
        oracle = self.oracle
        self.trace.append((cause, *of))
        oracle.cause, oracle.now_s = cause, self._clock_s()
        self.effects = 0
        self._touched.clear()
        yield
        oracle.batch_done()
        # Answers to what nobody waits for: the next turn looks again.
        if self.effects or cause != "deliver":
            self._check()

    def _check(self) -> None:
        oracle = self.oracle
        self.table.check_invariants()
        assert self.operations_in_flight == len(oracle.outstanding)
        waiting = len(oracle.outstanding) - len(oracle.abandoned)
        assert len(self._waiting) == waiting, "only who is not answered waits"
        bounded = sum(not isinstance(r, Release | Renew) for r in oracle.outstanding.values())
        assert bounded <= oracle.queue_limit
        assert len(oracle.caches) <= oracle.cache_limit
        assert self.num_caches == len(self.journal) == len(oracle.caches)
        if self._counts_bytes and self._touched:
            self.journal.check_bytes()
        for cache_id in self._touched & oracle.caches.keys():
            assert list(self.journal.token_ids(cache_id)) == oracle.caches[cache_id].tokens
