"""The state machine as the schedules drive it: the one place of the simulator that looks inside it.

`WatchedMachine` tells the oracle which ticket each request gets, and answers what only the machine knows.
`PlantedMachine` stands between a gateway and its machine and lets a planted bug change what goes in and what
comes out: requests, workers' answers, commands, records and replies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from service.caches.admission import Limits
from service.caches.answers import Event
from service.caches.effects import Effects, Write
from service.caches.entries import Operation, WorkerView
from service.caches.ledger import CacheState, Ledger
from service.caches.machine import CacheMachine
from service.caches.records import Record
from service.caches.requests import Release, Request, Result
from service.errors import QuireError
from tests.forwards import Told, as_command, told
from tests.sim.invariants import phase_of
from tests.sim.oracle import Oracle
from tests.sim.truth import Asked

# Small, so that short sequences have several chunks, full and begun.
SEGMENT_TOKENS = 4


class WatchedMachine(CacheMachine):
    """Tells which ticket each request gets."""

    ledger_type: type[Ledger] = Ledger

    def __init__(self, limits: Limits, **names: Any) -> None:
        super().__init__(limits, ledger=self.ledger_type(SEGMENT_TOKENS), **names)

    def watch(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.upcoming: deque[Asked] = deque()
        self._written: list[Write] = []

    def submit(self, requests: Sequence[Request], *args: Any) -> list[int]:
        tickets = super().submit(requests, *args)
        for ticket in tickets:
            self.oracle.tickets[ticket] = self.upcoming.popleft()
        return tickets

    def tick(self, now_s: float) -> None:
        self.oracle.now_s = now_s
        super().tick(now_s)

    def take_effects(self) -> Effects:
        effects = self.changed(super().take_effects())
        self._written += effects.writes
        return effects

    def changed(self, effects: Effects) -> Effects:
        """What is carried out of what the machine wants done."""
        return effects

    def written(self) -> Sequence[Write]:
        """What was to be written since the last call."""
        writes, self._written = self._written, []
        return writes

    # Of forwards.

    def sequence_of(self, op_id: int) -> tuple[Asked | None, int]:
        """For whom a forward is computed, if that is not over, and the number of his cache."""
        operation = self._attempts.running.get(op_id)
        return (None, 0) if operation is None else self._asked_of(operation)

    def computes(self, op_id: int) -> int:
        """The sequence that a forward computes, and does not replay; 0: none."""
        operation = self._attempts.running.get(op_id)
        return operation.entry.number if operation is not None and phase_of(operation) == "computing" else 0

    def computed_on(self, worker_id: str, epoch: int) -> list[tuple[Asked | None, int]]:
        """For whom a worker computes what."""
        worker = self.worker(worker_id, epoch)
        return [] if worker is None else [self._asked_of(o) for o in self._attempts.under_way(worker)]

    def _asked_of(self, operation: Operation) -> tuple[Asked | None, int]:
        return self.oracle.tickets.get(operation.ticket), operation.entry.number

    # Of operations.

    def phase_of(self, ticket: int) -> str:
        """How far an operation has come."""
        return phase_of(self.operations[ticket])

    def phases_beside(self, epoch: int) -> Iterator[tuple[str, bool]]:
        """How far each operation has come, and whether the worker of this epoch computes it."""
        for operation in self.operations.values():
            worker = operation.entry.worker if operation.op_id else None
            yield phase_of(operation), worker is not None and worker.epoch == epoch

    def parked(self) -> Iterator[Asked]:
        """Those whose turn has come, and who wait for a worker or for room."""
        for ticket, operation in self.operations.items():
            if phase_of(operation) == "parked" and ticket in self.oracle.tickets:
                yield self.oracle.tickets[ticket]

    def partly_begun(self) -> int:
        """How many forks have their turn on some of their caches, and wait for it on others."""
        return sum(
            o.turns_left and any(entry.running is o for entry in o.entries[1:])
            for o in self.operations.values()
        )

    def own_operations(self) -> int:
        """Those that nobody has asked for."""
        own = [o for ticket, o in self.operations.items() if ticket not in self.oracle.tickets]
        assert all(isinstance(o.request, Release) for o in own)
        return len(own)

    # Of caches and workers.

    def state_of(self, cache_id: str) -> CacheState | None:
        """What the ledger has of a cache, if there is one of that name."""
        return next((state for state in self.ledger if state.cache_id == cache_id), None)

    def check_leases(self, now_s: float) -> None:
        """To be asked after `expire`."""
        if not self.admission.journal_works:
            # Nothing can be released then.
            return
        # One that is closing is released already: a fork, say, has its record in a write.
        kept = (entry for entry in self.index if not (entry.busy or entry.closing))
        assert all(entry.expires_at_s > now_s for entry in kept), "what ran out is released"

    def worker(self, worker_id: str, epoch: int) -> WorkerView | None:
        """One incarnation of a worker, if it is ready."""
        return self._workers.find(worker_id, epoch)

    def workers(self) -> Iterator[WorkerView]:
        """Those that are ready."""
        return iter(self._workers)

    def held_by(self, worker: WorkerView) -> Iterator[tuple[CacheState, int]]:
        """The caches whose KV a worker has, and how many of their tokens."""
        return ((entry.state, min(entry.kv_len, entry.length)) for entry in worker.held)

    def check_empty(self) -> None:
        """Asserts that nothing is left."""
        assert len(self) == len(self.ledger) == self.ledger.size_bytes == self.operations_in_flight == 0
        assert not len(self.index.idempotency) and not self.index._numbers
        assert self.admission._caches == self.admission._queued_bytes == 0
        assert all(len(view.held) == view.pages_queued == 0 for view in self.workers())


class PlantedMachine(WatchedMachine):
    """Changes nothing by itself: what is planted overrides some of the `on_` methods."""

    # What would show a bug at once, if its consequences are to show it: not looked at.
    silent: Sequence[str] = ()

    def watch(self, oracle: Oracle) -> None:
        super().watch(oracle)
        self._refused: dict[int, QuireError] = {}
        # By the number of who was to be answered; and tickets that the machine has no operation of any more.
        self._instead: dict[int, Sequence[Record]] = {}
        self._unknown: set[int] = set()
        # Whose answer was taken away: as if it were still computed.
        self._unanswered: set[int] = set()

    # What goes in.

    def on_request(self, request: Request, asked: Asked) -> Request | QuireError:
        """What the machine is asked instead, or what it refuses."""
        return request

    def on_event(self, event: Event) -> Event:
        """What the machine is told that a worker answered."""
        return event

    # What comes out.

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        """What is sent to a worker instead."""
        return (command,)

    def on_write(self, asked: Asked, records: Sequence[Record]) -> Sequence[Record] | None:
        """What the journal is given instead; None: nothing."""
        return records

    def on_reply(self, asked: Asked, outcome: Result | QuireError) -> Result | QuireError | None:
        """What is answered instead; None: nothing."""
        return outcome

    def written_instead(self, asked: Asked, records: Sequence[Record]) -> None:
        """For `on_reply`: in the place of an answer that it takes away something is written."""
        self._instead[asked.number] = records

    # As the machine is called.

    @property
    def operations_in_flight(self) -> int:
        known = self.oracle.outstanding.keys() | self.oracle.abandoned.keys()
        return super().operations_in_flight + len(known & self._unanswered)

    def submit(self, requests: Sequence[Request], *args: Any) -> list[int]:
        return [self._submit_changed(request, *args) for request in requests]

    def _submit_changed(self, request: Request, *args: Any) -> int:
        passed = self.on_request(request, self.upcoming[0])
        if not isinstance(passed, QuireError):
            return super().submit([passed], *args)[0]
        # To release what there is not is answered at once.
        (ticket,) = super().submit([Release("")], *args)
        self._refused[ticket] = passed
        return ticket

    def answered(self, events: Sequence[Event], now_s: float, *of_worker: Any) -> None:
        super().answered([self.on_event(event) for event in events], now_s, *of_worker)

    def committed(self, tickets: Sequence[int], now_s: float) -> None:
        super().committed([ticket for ticket in tickets if ticket not in self._unknown], now_s)

    def changed(self, effects: Effects) -> Effects:
        changed = Effects([], [], [])
        for worker_id, epoch, command in effects.commands:
            for passed in self.on_command(worker_id, epoch, told(command)):
                changed.commands.append((worker_id, epoch, as_command(passed)))
        for ticket, records in effects.writes:
            self._write(changed, ticket, records)
        for ticket, outcome in effects.replies:
            self._reply(changed, ticket, outcome)
        return changed

    def _write(self, changed: Effects, ticket: int, records: Sequence[Record]) -> None:
        asked = self.oracle.tickets.get(ticket)
        # Without it is the gateway's own.
        passed = records if asked is None else self.on_write(asked, records)
        if passed is not None:
            changed.writes.append((ticket, passed))

    def _reply(self, changed: Effects, ticket: int, outcome: Result | QuireError) -> None:
        asked = self.oracle.tickets.get(ticket)
        if asked is None:
            changed.replies.append((ticket, outcome))
        elif ticket in self._refused:
            changed.replies.append((ticket, self._refused.pop(ticket)))
        elif (passed := self.on_reply(asked, outcome)) is not None:
            changed.replies.append((ticket, passed))
        else:
            self._unanswered.add(asked.number)
            if asked.number in self._instead:
                self._unknown.add(ticket)
                changed.writes.append((ticket, self._instead.pop(asked.number)))
