"""One seeded schedule: callers, workers, crashes and the clock, in any order, over the real dispatcher.

python -m tests.sim --seeds 0:100000     # more schedules than the test runs
python -m tests.sim --seeds 4711         # one again, with its trace if it fails
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from quire.v1 import worker_pb2

from service.caches.effects import Command, ForwardSequence
from service.caches.placement import WorkerView
from service.caches.records import Record
from service.caches.requests import Release, Renew, Request
from service.caches.table import CacheTable, Limits
from service.dispatcher import Dispatcher, Outcome
from service.journal.memory import MemoryJournal
from service.pool import wire
from tests.sim.callers import Callers
from tests.sim.model_worker import ModelWorker, Pool
from tests.sim.oracle import Oracle
from tests.sim.rest import check_end, check_rest

MAX_SEQ_LEN = 24
EVENTS = 220
# The first is smaller than a context. In the next two sequences get into each other's way.
POOLS = (Pool(5, page_tokens=4), Pool(12, page_tokens=4), Pool(6), Pool(30), Pool(1000))


class WatchedJournal(MemoryJournal):
    """Tells the simulation of each record as it is written."""

    def __init__(self, on_record: Callable[[Record], None]) -> None:
        super().__init__()
        self._on_record = on_record

    def append(self, records: Sequence[Record]) -> None:
        super().append(records)
        for record in records:
            self._on_record(record)


class Simulation:
    """The gateway but for its sockets, and the workers but for their tensors. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.trace: deque[object] = deque(maxlen=60)
        self._pool = rng.choice(POOLS)
        self._capacity_tokens = min(MAX_SEQ_LEN, self._pool.pages * self._pool.page_tokens)
        self.oracle = Oracle(self._capacity_tokens, seen)
        self.callers = Callers(rng, self.oracle)
        self.oracle.queue_limit = rng.choice((6, 1000, 1000, 1000))
        self.oracle.cache_limit = rng.choice((5, 1000, 1000, 1000))
        numbers = itertools.count(1)
        self.table = CacheTable(
            Limits(self.oracle.queue_limit, default_lease_s=20.0, max_caches=self.oracle.cache_limit),
            new_cache_id=lambda: f"kv{next(numbers)}",
            new_seed=lambda: rng.randrange(1 << 32),
        )
        self.journal = WatchedJournal(self._on_record)
        self.dispatcher = Dispatcher(self.table, self.journal, self._send, clock_s=lambda: self.oracle.now_s)
        # Most callers wait for their answers: more than this are seldom under way.
        self._patience = rng.choice((1, 3, 8, 20))
        self._last_epoch = 0
        self.workers: dict[str, ModelWorker] = {}
        self._worker_ids = [f"worker-{index}" for index in range(rng.choice((1, 1, 2, 3)))]
        # Answers of incarnations that are gone already; the gateway must not mind them.
        self._late: list[tuple[ModelWorker, worker_pb2.WorkerEvent]] = []
        # What came out of the dispatcher in this turn: effects carried out, and caches written about.
        self._effects = 0
        self._touched: set[str] = set()
        self._actions: list[tuple[Callable[[], None], float]] = [
            (self._submit, 40),
            (self._take, 30),
            (self._step, 30),
            (self._deliver, 30),
            (self._cancel, 2.5),
            (self._expire, 2),
            (self._pass_time, 5),
            (self._crash, 0.4),
            (self._notice, 2),
            (self._start, 15),
            (self._forget, 0.4),
            (self._deliver_late, 1),
            (self._drain, 0.02),
        ]

    def run(self) -> None:
        """Anything at any moment; then all comes to rest, and then to an end."""
        for worker_id in self._worker_ids:
            self._start_worker(worker_id)
        actions, weights = zip(*self._actions, strict=True)
        for action in self.rng.choices(actions, weights, k=EVENTS):
            action()
        self._settle()
        check_rest(self.table, self.journal, self.oracle, self.workers.values())
        self._ask([Release(cache_id) for cache_id in self.oracle.caches])
        self._settle()
        check_end(self.table, self.journal, self.workers.values())

    # Callers.

    def _submit(self) -> None:
        waiting = len(self.oracle.outstanding)
        nothing_to_use = waiting and not self.oracle.caches
        if (nothing_to_use or waiting >= self._patience) and self.rng.random() < 0.9:
            return
        self._ask([self.callers.request() for _ in range(self.rng.choice((1, 1, 1, 1, 2, 4)))])

    def _ask(self, requests: Sequence[Request]) -> None:
        """Those of one call are submitted together."""
        oracle = self.oracle
        numbers = [oracle.submitted(request) for request in requests]
        with self._turn("submit"):
            self.trace.extend(zip(numbers, requests, strict=True))
            tickets = self.dispatcher.start(
                requests, lambda index, outcome: self._on_outcome(numbers[index], outcome), caller=1
            )
            oracle.tickets.update(zip(numbers, tickets, strict=True))

    def _on_outcome(self, number: int, outcome: Outcome) -> None:
        self.trace.append(("->", number, outcome))
        self._effects += 1
        self.oracle.replied(number, outcome)

    def _cancel(self) -> None:
        """Who goes takes back one call, or all of a Session."""
        outstanding = [number for number in self.oracle.outstanding if number not in self.oracle.abandoned]
        if not outstanding:
            return
        count = self.rng.choice((1, 1, 5))
        numbers = sorted(self.rng.sample(outstanding, min(count, len(outstanding))))
        for number in numbers:
            self.oracle.cancelled(number)
        with self._turn("cancel", *numbers):
            self.dispatcher.cancel([self.oracle.tickets[number] for number in numbers])

    # Time.

    def _pass_time(self) -> None:
        self.oracle.now_s += self.rng.choice((0.1, 1.0, 1.0, 6.0))

    def _expire(self) -> None:
        before = len(self.oracle.caches)
        with self._turn("expire"):
            expired = self.dispatcher.expire()
        assert len(self.oracle.caches) == before - expired
        busy = {id(self.oracle.cache_of(r)) for r in self.oracle.outstanding.values()}
        for _, handle in self.dispatcher.handles():
            used = id(self.oracle.caches[handle.cache_id]) in busy
            assert used or handle.expires_at_s > self.oracle.now_s, "what ran out is released"

    def _drain(self) -> None:
        self.dispatcher.start_draining()
        self.oracle.draining = True

    # Workers.

    def _any_worker(self) -> ModelWorker | None:
        return self.rng.choice(list(self.workers.values())) if self.workers else None

    def _start(self) -> None:
        missing = [worker_id for worker_id in self._worker_ids if worker_id not in self.workers]
        if missing:
            self._start_worker(self.rng.choice(missing))

    def _start_worker(self, worker_id: str) -> None:
        self._last_epoch += 1
        worker = ModelWorker(worker_id, self._last_epoch, self._pool, self.rng, self.seen)
        self.workers[worker_id] = worker
        self.oracle.ready_epochs.add(worker.epoch)
        view = WorkerView(
            worker_id,
            worker.epoch,
            page_tokens=self._pool.page_tokens,
            pages_total=self._pool.pages,
            capacity_tokens=self._capacity_tokens,
            pages_available=self._pool.pages,
        )
        with self._turn("worker ready", worker_id):
            self.dispatcher.worker_ready(view)

    def _take(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.take(self.rng.randint(1, 6))

    def _step(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.step()

    def _deliver(self) -> None:
        worker = self._any_worker()
        if worker is not None and worker.outbox:
            self._deliver_events(worker, self.rng.randint(1, 4))

    def _deliver_events(self, worker: ModelWorker, count: int) -> None:
        """A message of a worker arrives."""
        events = [worker.outbox.popleft() for _ in range(min(count, len(worker.outbox)))]
        for event in events:
            if event.WhichOneof("event") == "error":
                self.oracle.worker_failures[event.op_id] = (event.error.reason, event.op_id in worker.excused)
        self._answer(worker, events)

    def _answer(self, worker: ModelWorker, events: Iterable[worker_pb2.WorkerEvent]) -> None:
        response = worker_pb2.ConnectResponse(events=events, pages_available=worker.pages_left)
        with self._turn("deliver", *(event.op_id for event in response.events)):
            self.dispatcher.worker_answered(
                worker.worker_id, worker.epoch, wire.to_events(response), response.pages_available
            )

    def _deliver_late(self) -> None:
        """What a fenced worker still says changes nothing. Op ids are never reused."""
        if self._late:
            worker, event = self._late.pop()
            self._answer(worker, [event])
            assert not self._effects, "an answer from the grave"

    def _crash(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            worker.crashed = True
            self.trace.append(("crash", worker.worker_id))
            self.seen["crash"] += 1
            if self.rng.random() < 0.5:
                self._lose(worker)

    def _notice(self) -> None:
        for worker in list(self.workers.values()):
            if worker.crashed:
                self._lose(worker)

    def _lose(self, worker: ModelWorker) -> None:
        del self.workers[worker.worker_id]
        self._late.extend((worker, event) for event in worker.outbox)
        self.oracle.ready_epochs.discard(worker.epoch)
        self.oracle.worker_lost(worker.epoch)
        with self._turn("worker lost", worker.worker_id):
            self.dispatcher.worker_lost(worker.worker_id, worker.epoch)

    def _forget(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.forget()

    # Effects.

    @contextlib.contextmanager
    def _turn(self, cause: str, *of: object) -> Iterator[None]:
        """One input to the dispatcher, all effects of which have been carried out at its end."""
        oracle = self.oracle
        self.trace.append((cause, *of))
        oracle.cause = cause
        self._effects = 0
        self._touched.clear()
        yield
        oracle.batch_done()
        if not self._effects and cause == "deliver":
            # Answers to what nobody waits for: the next turn looks again.
            return
        self.table.check_invariants()
        assert self.dispatcher.operations_in_flight == len(oracle.outstanding)
        waiting = len(oracle.outstanding) - len(oracle.abandoned)
        assert len(self.dispatcher._waiting) == waiting, "only who is not answered waits"
        bounded = sum(not isinstance(r, Release | Renew) for r in oracle.outstanding.values())
        assert bounded <= oracle.queue_limit
        assert len(oracle.caches) <= oracle.cache_limit
        assert self.dispatcher.num_caches == len(self.journal) == len(oracle.caches)
        for cache_id in self._touched & oracle.caches.keys():
            assert list(self.journal.token_ids(cache_id)) == oracle.caches[cache_id].tokens

    def _on_record(self, record: Record) -> None:
        self._effects += 1
        self._touched.add(record.cache_id)
        self.oracle.written(record)

    def _send(self, worker_id: str, epoch: int, command: Command) -> None:
        self._effects += 1
        worker = self.workers[worker_id]
        assert worker.epoch == epoch
        if isinstance(command, ForwardSequence):
            operation = self.table._operations.get(command.op_id)
            if operation is not None:
                entry = operation.entry
                tokens = self.journal.token_ids(entry.cache_id) if entry.visible else ()
                assert command.position <= len(tokens)
                worker.expected[command.op_id] = tokens[: command.position]
        worker.inbox.append(wire.to_message(command))

    # The end.

    def _settle(self) -> None:
        """Everything under way arrives."""
        self._notice()
        while not all(worker.idle for worker in self.workers.values()):
            for worker in self.workers.values():
                worker.take(len(worker.inbox))
                worker.step(all_jobs=True)
                self._deliver_events(worker, len(worker.outbox))
        assert not self.oracle.outstanding, "every caller is answered"
