"""The dispatcher of one incarnation of the gateway, with the oracle at every door of it."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from service.caches.answers import CommandFailed, Event
from service.caches.effects import Command, ReleaseSequences, Send, Write
from service.caches.entries import CacheEntry, Operation, WorkerView
from service.caches.ledger import Ledger
from service.caches.requests import Append, PreviousCaches, Release, Renew, Request
from service.caches.tenants import Tenant
from service.dispatcher import Dispatcher, OnOutcomes, Outcomes, SendCommands
from tests.forwards import told
from tests.sim.disk import DiskJournal
from tests.sim.invariants import check_invariants
from tests.sim.journal_bytes import NeededBytes
from tests.sim.machine import SEGMENT_TOKENS, WatchedMachine
from tests.sim.model_worker import KV_MISSING, ModelWorker, together
from tests.sim.oracle import Oracle
from workers.common import worker_pb2

# No schedule fills that.
LARGE_BYTES = 1 << 28
# One that may be guilty is found out within so many deaths; each other such one may add some.
MOST_KILLED = 4


class WatchedDispatcher(Dispatcher):
    """Tells the oracle what comes in, and has it check what comes out."""

    def __init__(
        self,
        machine: WatchedMachine,
        journal: DiskJournal,
        send: SendCommands,
        clock_s: Callable[[], float],
        oracle: Oracle,
        trace: deque[object],
    ) -> None:
        super().__init__(machine, journal, self._on_send, clock_s)
        machine.watch(oracle)
        self.machine = machine
        self.journal = journal
        self.oracle = oracle
        self.trace = trace
        self.needed = NeededBytes(SEGMENT_TOKENS)
        # Of the present turn.
        self.effects = 0
        # Whose each request is, by number; and its ticket.
        self.callers: dict[int, int] = {}
        self.ticket_of: dict[int, int] = {}
        # Workers that died of a sequence.
        self.killed: Counter[int] = Counter()
        self._send_on = send
        self._groups: deque[Sequence[Write]] = deque()
        # Counting takes time: done in each turn only where it may run out.
        self._counts_bytes = oracle.budget.limit_bytes < LARGE_BYTES
        # What was found while effects were carried out, which a dispatcher survives: it ends the schedule.
        self._found: Exception | None = None
        journal.on_commit, journal.on_end = self._on_commit, self._on_end

    # What comes in.

    def start(
        self, requests: Sequence[Request], on_outcomes: OnOutcomes, caller: int, tenant: Tenant | None = None
    ) -> list[int]:
        oracle, machine = self.oracle, self.machine
        whose = tenant or oracle.anonymous
        with self._turn("submit"):
            oracle.budget.taken_bytes = machine.ledger.size_bytes
            asked = [oracle.submitted(request, whose) for request in requests]
            self.callers.update((a.number, caller) for a in asked)
            machine.upcoming.extend(asked)

            def replied(found: Outcomes) -> None:
                self.effects += len(found)
                with self._noted():
                    for index, outcome in found:
                        self.trace.append(("->", asked[index].number, outcome))
                        oracle.replied(asked[index], outcome)
                    on_outcomes(found)

            self.trace.extend((a.number, a.request) for a in asked)
            tickets = super().start(requests, replied, caller, whose if whose.name else None)
            self.ticket_of.update(zip((a.number for a in asked), tickets, strict=True))
            waiting = oracle.outstanding.keys() | oracle.abandoned.keys()
            oracle.budget.admitted(waiting, [a.number for a in asked])
        return tickets

    def cancel(self, tickets: Iterable[int]) -> None:
        oracle, tickets = self.oracle, list(tickets)
        asked = sorted((oracle.tickets[ticket] for ticket in tickets), key=lambda a: a.number)
        there = [a for a in asked if a.number in oracle.outstanding]
        with self._turn("cancel", *(a.number for a in there)):
            for a in there:
                oracle.cancelled(a)
            super().cancel(tickets)

    def expire(self, entries: Iterable[CacheEntry]) -> int:
        is_whole = {*entries} >= {*self.machine.index}
        with self._turn("expire"):
            expired = super().expire(entries)
        # While nothing can be written nothing is released.
        if self.machine.admission.journal_works and is_whole:
            self.machine.check_leases(self.oracle.now_s)
        return expired

    def tick(self) -> None:
        """As `keep_time` does."""
        with self._turn("tick"):
            self.machine.tick(self._clock_s())
            # What is taken back of nobody: the effects are carried out.
            super().cancel(())

    def probe(self) -> None:
        """As `keep_time` does: whether the journal can be written again."""
        with self._turn("probe"):
            self._commit(())

    def worker_ready(self, worker: WorkerView, kept: Mapping[int, int] | None = None) -> None:
        self.oracle.was_ready = True
        with self._turn("worker ready", worker.worker_id, worker.epoch, kept):
            super().worker_ready(worker, kept)

    def worker_lost(self, worker_id: str, epoch: int, *, crashed: bool = True, culprit: int = 0) -> None:
        """`culprit`: the forward of which it died."""
        _, guilty = self.machine.sequence_of(culprit)
        self.killed[guilty] += 1
        assert not guilty or self.killed[guilty] <= MOST_KILLED, "it should have been quarantined by now"
        for asked, number in self.machine.computed_on(worker_id, epoch):
            self.oracle.deaths.setdefault(number, []).append(guilty)
            if asked is not None:
                asked.deaths += 1
        with self._turn("worker lost", worker_id, epoch):
            super().worker_lost(worker_id, epoch, crashed=crashed)

    def worker_draining(self, worker_id: str, epoch: int) -> None:
        with self._turn("worker drains", worker_id, epoch):
            super().worker_draining(worker_id, epoch)

    def worker_suspected(self, worker_id: str, epoch: int, *, suspect: bool) -> None:
        self.oracle.seen["suspected" if suspect else "heard again"] += 1
        super().worker_suspected(worker_id, epoch, suspect=suspect)

    def worker_answered(
        self, worker_id: str, epoch: int, events: Iterable[Event], pages_available: int
    ) -> None:
        events = list(events)
        for op_id, answer in events:
            if answer is not None and not isinstance(answer, CommandFailed):
                # Who is computed after all has a clean slate again, poison or not.
                self.killed.pop(self.machine.computes(op_id), None)
        with self._turn("deliver", *(op_id for op_id, _ in events)):
            super().worker_answered(worker_id, epoch, events, pages_available)

    def weights_replaced(self, weights: int, workers: Sequence[WorkerView], previous: PreviousCaches) -> None:
        is_end = previous is PreviousCaches.END
        self.oracle.continue_with(weights, weights if is_end else self.oracle.continued)
        with self._turn("weights replaced", weights, previous):
            super().weights_replaced(weights, workers, previous)

    def start_draining(self) -> None:
        super().start_draining()
        self.oracle.draining = True

    # What comes out.

    def expect(self, worker: ModelWorker, command: Command) -> None:
        """Tells a worker what a forward must find there."""
        asked, number = self.machine.sequence_of(command.op_id)
        # Some are taken back in the turn in which they are asked for.
        if isinstance(command, Operation) and number:
            if asked is not None:
                asked.sequence = number
                if isinstance(asked.request, Append):
                    self.oracle.sequences[asked.tenant, asked.request.request_id] = number
            cache = self.oracle.numbered.get(number)
            assert cache is None or cache.weights == worker.weights, "computed with its own weights"
            tokens = cache.tokens if cache is not None else []
            assert command.position <= len(tokens)
            worker.expected[command.op_id] = tokens[: command.position]

    def take_answers(self, worker: ModelWorker, count: int) -> worker_pb2.ConnectResponse:
        """The next message of a worker, with so many answers. The oracle learns of its failures."""
        events = [worker.outbox.popleft() for _ in range(min(count, len(worker.outbox)))]
        for event in events:
            if event.WhichOneof("event") != "error":
                continue
            asked, _ = self.machine.sequence_of(event.op_id)
            if asked is not None:
                asked.failures.append(event.error.reason)
            excused = event.error.reason != KV_MISSING or event.op_id in worker.excused
            assert excused, "KV that was never lost cannot be missing"
        return worker_pb2.ConnectResponse(
            events=together(events, worker.plain), pages_available=worker.pages_left
        )

    def _on_send(self, commands: Sequence[Send]) -> None:
        self.effects += len(commands)
        self.trace.extend((worker_id, epoch, told(command)) for worker_id, epoch, command in commands)
        for _, _, command in commands:
            if isinstance(command, ReleaseSequences) and self.oracle.numbered.keys() & set(command.numbers):
                self.oracle.seen["KV of a cache dropped"] += 1
        with self._noted():
            self._send_on(commands)

    def _on_commit(self) -> None:
        """Records are given to the journal: those that the machine had written since the last time."""
        self.oracle.now_s = self._clock_s()
        writes = self.machine.written()
        self.effects += 1
        self.trace.append(("write", *writes))
        with self._noted():
            self.oracle.given_to_journal(writes)
        self._groups.append(writes)

    def _on_end(self, durable: bool, then: Callable[[bool], None] | None) -> None:
        """What was given to the journal first has ended. `then` tells the gateway, if there still is one."""
        self.oracle.now_s = self._clock_s()
        self.trace.append(("durable" if durable else "not durable",))
        writes = self._groups.popleft()
        for _, records in writes:
            for record in records if durable else ():
                self.needed.written(record)
        self.oracle.commit_ended(durable)
        if then is not None:
            with self._turn("committed", *(ticket for ticket, _ in writes)):
                then(durable)

    @contextlib.contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._found = self._found or error
            raise

    @contextlib.contextmanager
    def _turn(self, cause: str, *of: object) -> Iterator[None]:
        """One input, all effects of which have been carried out at its end."""
        oracle = self.oracle
        self.trace.append((cause, *of))
        oracle.now_s = self._clock_s()
        self.effects = 0
        yield
        if self._found is not None:
            raise self._found
        oracle.turn_ended()
        # Answers to what nobody waits for: the next turn looks again.
        if self.effects or cause != "deliver":
            self._check()

    def _check(self) -> None:
        oracle, machine = self.oracle, self.machine
        check_invariants(machine)
        known = oracle.outstanding.keys() | oracle.abandoned.keys()
        oracle.own_operations = machine.own_operations()
        assert machine.operations_in_flight == len(known) + oracle.own_operations
        assert len(self._waiting) == len(oracle.outstanding), "only who is not answered waits"
        bounded = sum(not isinstance(a.request, Release | Renew) for a in oracle.outstanding.values())
        assert bounded <= oracle.queue_limit
        assert len(oracle.caches) <= oracle.cache_limit
        assert len(machine) == len(oracle.caches), "what is there is what was written"
        oracle.seen["fork that waits for its last turn"] += machine.partly_begun()
        if self._counts_bytes:
            self.check_bytes()

    def check_bytes(self) -> None:
        """Asserts that the ledger takes what its caches need, and no more."""
        assert self.machine.ledger.size_bytes == self.needed.of(self.oracle.numbered)

    def check_truth(self) -> None:
        """Asserts that what the machine has is what is true, token for token."""
        check_ledger(self.machine.ledger, self.oracle)


def check_ledger(ledger: Ledger, oracle: Oracle) -> None:
    """Asserts that a ledger has the caches there are, as they are."""
    assert {state.number for state in ledger} == oracle.numbered.keys(), "what is kept is what was written"
    for state in ledger:
        cache = oracle.numbered[state.number]
        assert list(state.tokens.copy()) == cache.tokens
        assert (state.cache_id, state.tenant, state.seed) == (cache.cache_id, cache.tenant.name, cache.seed)
        assert (state.lease_s, state.prompt_len) == (cache.lease_s, cache.prompt_len)
        # Of those that can only be released a restart may forget that they had continued.
        is_over = max(state.weights, cache.weights) < oracle.continued
        assert state.weights == cache.weights or is_over
        assert state.request_id == cache.request_id
        key = None if state.fork is None else (state.fork.request_id, state.fork.index, state.fork.count)
        made = None
        if cache.fork is not None:
            forked, index = cache.fork
            made = (forked.request.request_id, index, forked.request.count)
        assert key == made
        assert (state.last is None) is (cache.last is None)
