"""One seeded schedule: callers, workers, crashes and the clock, in any order, over the real dispatcher.

python -m tests.sim --seeds 0:100000     # more schedules than the test runs
python -m tests.sim --seeds 4711         # one again, with its trace if it fails
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from quire.v1 import worker_pb2

from service.caches.effects import Command
from service.caches.placement import WorkerView
from service.caches.requests import Release, Request
from service.caches.table import CacheTable, Limits
from service.pool import wire
from tests.sim.callers import Callers
from tests.sim.model_worker import ModelWorker, Pool
from tests.sim.oracle import Oracle
from tests.sim.rest import check_end, check_rest
from tests.sim.watched import LARGE_BYTES, WatchedDispatcher, WatchedJournal

MAX_SEQ_LEN = 24
EVENTS = 220
# The first is smaller than a context. In the next two sequences get into each other's way.
POOLS = (Pool(5, page_tokens=4), Pool(12, page_tokens=4), Pool(6), Pool(30), Pool(1000))


class Simulation:
    """The gateway but for its sockets, and the workers but for their tensors. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self._pool = rng.choice(POOLS)
        self._capacity_tokens = min(MAX_SEQ_LEN, self._pool.pages * self._pool.page_tokens)
        self.oracle = Oracle(self._capacity_tokens, seen)
        self.callers = Callers(rng, self.oracle)
        self.oracle.queue_limit = rng.choice((6, 1000, 1000, 1000))
        self.oracle.cache_limit = rng.choice((5, 1000, 1000, 1000))
        self.oracle.budget.limit_bytes = rng.choice((rng.choice((1_500, 3_000, 6_000)), *[LARGE_BYTES] * 2))
        self._now_s = 0.0
        self.table = new_table(rng, self.oracle)
        self.journal = WatchedJournal()
        self.dispatcher = WatchedDispatcher(
            self.table, self.journal, self._send, lambda: self._now_s, self.oracle
        )
        self.trace = self.dispatcher.trace
        # Most callers wait for their answers: more than this are seldom under way.
        self._patience = rng.choice((1, 3, 8, 20))
        self._last_epoch = 0
        self.workers: dict[str, ModelWorker] = {}
        self._worker_ids = [f"worker-{index}" for index in range(rng.choice((1, 1, 2, 3)))]
        # Answers of incarnations that are gone already; the gateway must not mind them.
        self._late: list[tuple[ModelWorker, worker_pb2.WorkerEvent]] = []
        self._actions: list[tuple[Callable[[], object], float]] = [
            (self._submit, 40),
            (self._take, 30),
            (self._step, 30),
            (self._deliver, 30),
            (self._cancel, 2.5),
            (self.dispatcher.expire, 2),
            (self._pass_time, 5),
            (self._pause, 0.7),
            (self._crash, 0.4),
            (self._notice, 2),
            (self._start, 15),
            (self._forget, 0.4),
            (self._deliver_late, 1),
            (self.dispatcher.start_draining, 0.02),
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
        self.dispatcher.start(requests, lambda *_: None, caller=1)

    def _cancel(self) -> None:
        """Who goes takes back one call, or all of a Session."""
        outstanding = [number for number in self.oracle.outstanding if number not in self.oracle.abandoned]
        if not outstanding:
            return
        count = self.rng.choice((1, 5))
        numbers = self.rng.sample(outstanding, min(count, len(outstanding)))
        self.dispatcher.cancel([self.oracle.tickets[number] for number in numbers])

    # Time.

    def _pass_time(self) -> None:
        self._now_s += self.rng.choice((0.1, 1.0, 1.0, 6.0))

    def _pause(self) -> None:
        """The process is stopped for a while; then everything is there at once, in any order."""
        self.seen["pause"] += 1
        self._now_s += self.rng.choice((2.0, 10.0, 60.0))
        arrivals: list[Callable[[], object]] = [
            self.dispatcher.expire,
            self._notice,
            *[self._cancel, self._submit] * 2,
            *(partial(self._deliver_all, worker) for worker in self.workers.values()),
        ]
        self.rng.shuffle(arrivals)
        for arrival in arrivals:
            arrival()

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
        view = WorkerView(
            worker_id,
            worker.epoch,
            page_tokens=self._pool.page_tokens,
            pages_total=self._pool.pages,
            capacity_tokens=self._capacity_tokens,
            pages_available=self._pool.pages,
        )
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
        self._answer(worker, self.dispatcher.take_answers(worker, count))

    def _deliver_all(self, worker: ModelWorker) -> None:
        """One that has worked on meanwhile has answered everything, unless it was found to be gone."""
        if self.workers.get(worker.worker_id) is not worker:
            return
        if not worker.crashed:
            worker.take(len(worker.inbox))
            worker.step(all_jobs=True)
        self._deliver_events(worker, len(worker.outbox))

    def _answer(self, worker: ModelWorker, response: worker_pb2.ConnectResponse) -> None:
        self.dispatcher.worker_answered(
            worker.worker_id, worker.epoch, wire.to_events(response), response.pages_available
        )

    def _deliver_late(self) -> None:
        """What a fenced worker still says changes nothing. Op ids are never reused."""
        if self._late:
            worker, event = self._late.pop()
            self._answer(worker, worker_pb2.ConnectResponse(events=[event]))
            assert not self.dispatcher.effects, "an answer from the grave"

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
        self.dispatcher.worker_lost(worker.worker_id, worker.epoch)

    def _forget(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.forget()

    def _send(self, worker_id: str, epoch: int, command: Command) -> None:
        worker = self.workers[worker_id]
        assert worker.epoch == epoch
        self.dispatcher.expect(worker, command)
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


def new_table(rng: random.Random, oracle: Oracle) -> CacheTable:
    """A table with the limits that the oracle knows, and names and seeds that can be had again."""
    numbers = itertools.count(1)
    return CacheTable(
        Limits(
            oracle.queue_limit,
            default_lease_s=20.0,
            max_caches=oracle.cache_limit,
            max_journal_bytes=oracle.budget.limit_bytes,
        ),
        new_cache_id=lambda: f"kv{next(numbers)}",
        new_seed=lambda: rng.randrange(1 << 32),
    )
