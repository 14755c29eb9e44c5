"""One seeded schedule: callers, workers, crashes and the clock, in any order, over the real state machine.

python -m tests.sim.simulation --seeds 0:100000     # more schedules than the test runs
python -m tests.sim.simulation --seeds 4711         # one again, with its trace if it fails
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable

from quire.v1 import worker_pb2

from service.caches.requests import Reply, Send, TruncateRequest, Write
from service.caches.table import CacheTable, Limits
from service.errors import CacheNotFound, KvExhausted, QuireError, StepTimeout, WorkerFault
from service.journal.memory import MemoryJournal
from tests.sim.callers import Callers
from tests.sim.model_worker import KV_EXHAUSTED, KV_MISSING, TIMEOUT, ModelWorker
from tests.sim.oracle import Oracle
from tests.sim.rest import check_end, check_rest

MAX_SEQ_LEN = 24
EVENTS = 220


class Simulation:
    """The whole system but for sockets and tensors. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.trace: deque[object] = deque(maxlen=60)
        self.oracle = Oracle(MAX_SEQ_LEN, seen)
        self.callers = Callers(rng, self.oracle)
        self.journal = MemoryJournal()
        self.oracle.queue_limit = rng.choice((6, 1000, 1000, 1000))
        numbers = itertools.count(1)
        self.table = CacheTable(
            Limits(self.oracle.queue_limit, default_lease_s=20.0),
            new_cache_id=lambda: f"kv{next(numbers)}",
            new_seed=lambda: rng.randrange(1 << 32),
        )
        # Most callers wait for their answers: more than this are seldom under way.
        self._patience = rng.choice((1, 3, 8, 20))
        self._pages = rng.choice((6, 30, 1000))
        self._last_epoch = 0
        self.workers: dict[str, ModelWorker] = {}
        self._worker_ids = [f"worker-{index}" for index in range(rng.choice((1, 1, 2, 3)))]
        # Answers of incarnations that are gone already; the state machine must not mind them.
        self._late: list[worker_pb2.WorkerEvent] = []
        self._actions: list[tuple[Callable[[], None], float]] = [
            (self._submit, 40),
            (self._take, 30),
            (self._step, 30),
            (self._deliver, 30),
            (self._cancel, 2.5),
            (self._release, 1),
            (self._renew, 2),
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
        for cache_id in list(self.oracle.caches):
            self._release_cache(cache_id)
        self._settle()
        check_end(self.table, self.journal, self.workers.values())

    # Callers.

    def _submit(self) -> None:
        waiting = len(self.oracle.outstanding)
        nothing_to_use = waiting and not self.oracle.caches
        if (nothing_to_use or waiting >= self._patience) and self.rng.random() < 0.9:
            return
        # Those of one call are submitted together.
        for _ in range(self.rng.choice((1, 1, 1, 1, 2, 4))):
            request = self.callers.request()
            ticket = self.table.submit(request, self.oracle.now_s)
            self.trace.append((ticket, request))
            self.oracle.submitted(ticket, request)
        self._carry_out("submit")

    def _cancel(self) -> None:
        if not self.oracle.outstanding:
            return
        ticket = self.rng.choice(list(self.oracle.outstanding))
        request = self.oracle.cancelled(ticket)
        self.table.cancel(ticket)
        self._carry_out(
            "cancel truncation" if isinstance(request, TruncateRequest) else "cancel", str(ticket)
        )

    def _release(self) -> None:
        self._release_cache(self.callers.cache_id())

    def _release_cache(self, cache_id: str) -> None:
        known = cache_id in self.oracle.caches
        assert self.table.release(cache_id) == known
        self._carry_out("release", cache_id)

    def _renew(self) -> None:
        cache_id, lease_s = self.callers.cache_id(), self.rng.choice((None, 3.0, 60.0))
        cache = self.oracle.caches.get(cache_id)
        try:
            handle = self.table.renew(cache_id, lease_s, self.oracle.now_s)
        except CacheNotFound:
            assert cache is None
            return
        assert cache is not None
        cache.lease_s = lease_s or cache.lease_s
        cache.promised_s = handle.expires_at_s
        assert handle.expires_at_s == self.oracle.now_s + cache.lease_s
        self._carry_out("renew", cache_id)

    # Time.

    def _pass_time(self) -> None:
        self.oracle.now_s += self.rng.choice((0.1, 1.0, 1.0, 6.0))

    def _expire(self) -> None:
        before = len(self.oracle.caches)
        expired = self.table.expire(self.oracle.now_s)
        self._carry_out("expire")
        assert len(self.oracle.caches) == before - expired
        busy = {id(self.oracle.cache_of(r)) for r in self.oracle.outstanding.values()}
        for _, handle in self.table.handles():
            used = id(self.oracle.caches[handle.cache_id]) in busy
            assert used or handle.expires_at_s > self.oracle.now_s, "what ran out is released"

    def _drain(self) -> None:
        self.table.draining = self.oracle.draining = True

    # Workers.

    def _any_worker(self) -> ModelWorker | None:
        return self.rng.choice(list(self.workers.values())) if self.workers else None

    def _start(self) -> None:
        missing = [worker_id for worker_id in self._worker_ids if worker_id not in self.workers]
        if missing:
            self._start_worker(self.rng.choice(missing))

    def _start_worker(self, worker_id: str) -> None:
        self._last_epoch += 1
        worker = ModelWorker(worker_id, self._last_epoch, self._pages, self.rng, self.seen)
        self.workers[worker_id] = worker
        self.oracle.ready_epochs.add(worker.epoch)
        self.table.worker_ready(worker_id, worker.epoch, worker.pages, MAX_SEQ_LEN)
        self._carry_out("worker_ready", worker_id)

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
        for _ in range(min(count, len(worker.outbox))):
            self._deliver_event(worker.outbox.popleft(), worker)
        self.table.worker_capacity(worker.worker_id, worker.epoch, worker.pages_left)
        self._carry_out("deliver", worker.worker_id)

    def _deliver_event(self, event: worker_pb2.WorkerEvent, worker: ModelWorker | None) -> None:
        kind, op_id, now_s = event.WhichOneof("event"), event.op_id, self.oracle.now_s
        self.trace.append((kind, op_id))
        if kind == "forward":
            self.table.forward_done(op_id, event.forward, now_s)
        elif kind == "done":
            self.table.control_done(op_id, now_s)
        else:
            reason = event.error.reason
            if worker is not None:
                self.oracle.worker_failures[op_id] = (reason, op_id in worker.excused)
            self.table.command_failed(op_id, _error_of(reason), kv_missing=reason == KV_MISSING)

    def _deliver_late(self) -> None:
        """What a fenced worker still says changes nothing. Op ids are never reused."""
        if self._late:
            self._deliver_event(self._late.pop(), None)
            assert not self.table.take_effects(), "an answer from the grave"

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
        self._late.extend(worker.outbox)
        self.oracle.ready_epochs.discard(worker.epoch)
        self.oracle.worker_lost(worker.epoch)
        self.table.worker_lost(worker.worker_id, worker.epoch)
        self._carry_out("worker_lost", worker.worker_id)

    def _forget(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.forget()

    # Effects.

    def _carry_out(self, *cause: str) -> None:
        oracle = self.oracle
        oracle.cause = (cause[0], cause[1] if len(cause) > 1 else "")
        touched: set[str] = set()
        effects = self.table.take_effects()
        if effects or cause[0] != "deliver":
            self.trace.append(cause)
        for effect in effects:
            match effect:
                case Write(record):
                    self.journal.append((record,))
                    oracle.written(record)
                    touched.add(record.cache_id)
                case Reply(ticket, outcome):
                    self.trace.append(("->", ticket, outcome))
                    oracle.replied(ticket, outcome)
                case Send():
                    self._send(effect)
        oracle.batch_done()
        self.table.check_invariants()
        assert self.table.operations_in_flight == len(oracle.outstanding) <= oracle.queue_limit
        assert len(self.table) == len(self.journal) == len(oracle.caches)
        for cache_id in touched & oracle.caches.keys():
            assert list(self.journal.token_ids(cache_id)) == oracle.caches[cache_id].tokens

    def _send(self, send: Send) -> None:
        worker = self.workers[send.worker_id]
        assert worker.epoch == send.epoch
        command = send.command
        operation = self.table._operations.get(command.op_id)
        if command.WhichOneof("command") == "forward" and operation is not None:
            entry, position = operation.entry, command.forward.position
            tokens = self.journal.token_ids(entry.cache_id) if entry.visible else ()
            assert position <= len(tokens)
            worker.expected[command.op_id] = tokens[:position]
        worker.inbox.append(command)

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


def _error_of(reason: int) -> QuireError:
    if reason == KV_EXHAUSTED:
        return KvExhausted(1, 0)
    return StepTimeout() if reason == TIMEOUT else WorkerFault()
