"""One seeded schedule: callers, workers, the journal, crashes of all of them and the clock, in any order.

python -m tests.sim --seeds 0:100000     # more schedules than the test runs
python -m tests.sim --seeds 4711         # one again, with its trace if it fails
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from service.caches.admission import Limits
from service.caches.effects import Claim, Send
from service.caches.ledger import Ledger
from service.caches.requests import Append, PreviousCaches, Release, Request
from service.caches.tenants import Tenant
from service.pool import wire
from tests.sim.callers import Callers
from tests.sim.disk import Disk, DiskJournal
from tests.sim.invariants import check_invariants
from tests.sim.machine import SEGMENT_TOKENS, WatchedMachine
from tests.sim.model_worker import Faults, ModelWorker, Pool, message_of, together
from tests.sim.oracle import Oracle
from tests.sim.rest import check_end, check_rest
from tests.sim.truth import MAX_WAIT_S
from tests.sim.watched import LARGE_BYTES, WatchedDispatcher, check_ledger
from workers.common import worker_pb2

MAX_SEQ_LEN = 24
MAX_LEASE_S = 1000.0
# Schedules differ in length: short ones find what happens at the beginning, and cost little.
EVENTS = (10, 20, 35, 50, 75, 140)
# The first is smaller than a context. In the next two sequences get into each other's way.
POOLS = (Pool(5, page_tokens=4), Pool(12, page_tokens=4), Pool(6), Pool(30), Pool(1000))
# Nobody waits longer than this once workers and the journal work again.
SETTLED_S = 10.0
# The state machine. Planted bugs put another in its place.
Machine = WatchedMachine
_TICK_S = 0.05


class Simulation:
    """The gateway but for its sockets, and the workers but for their tensors. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.trace: deque[object] = deque(maxlen=80)
        self._pool = rng.choice(POOLS)
        capacity_tokens = min(MAX_SEQ_LEN, self._pool.pages * self._pool.page_tokens)
        self.oracle = Oracle(capacity_tokens, MAX_LEASE_S, seen)
        self.tenants = [self.oracle.anonymous, Tenant("other")][: rng.choice((1, 1, 2))]
        self.callers = Callers(rng, self.oracle, self.tenants)
        self.callers.may_poison = rng.random() < 0.15
        poison = rng.choice((0.5, 0.9, 1.0)) if self.callers.may_poison else 0.0
        self._faults = rng.choice((Faults(poison=poison), Faults(step=0.0, timeout=0.0, poison=poison)))
        self.oracle.queue_limit = rng.choice((6, *[1000] * 7))
        self.oracle.cache_limit = rng.choice((5, *[1000] * 5))
        self.oracle.budget.limit_bytes = rng.choice((rng.choice((1_500, 3_000, 6_000)), *[LARGE_BYTES] * 4))
        # Whether the disk is there all the time, and how quick it is.
        self._disk_fails = rng.random() < 0.3
        disk_speed = rng.choice((25, 25, 10, 4))
        # How often the gateway crashes, and how likely a worker that outlived it is found by the next one.
        gateway_crashes = rng.choice((0.0, 1.0, 1.0, 5.0, 10.0))
        self._adoption = rng.choice((0.9, 0.3))
        self._now_s = 0.0
        self._names = itertools.count(1)
        self._disk = Disk()
        # Most callers wait for their answers: more than this are seldom under way.
        self._patience = rng.choice((1, 3, 8, 20))
        self._last_epoch = 0
        self.workers: dict[str, ModelWorker] = {}
        self._num_workers = rng.choice((1, 1, 2, 3))
        # Which weights are served, as it is written down.
        self._weights = 0
        # The first weights whose caches continue with those that are served, as it is written down; and after
        # which weights the workers are named that have got others in place.
        self._continued = 0
        self._named: dict[int, int] = {}
        # In some schedules nearly all is about that.
        self._switches = 12.0 if seed % 6 == 1 else 0.0
        # Those that have outlived their gateway, and those of them that were told what is wanted of them.
        self._orphans: list[ModelWorker] = []
        self._adopting: dict[str, tuple[ModelWorker, list[Claim]]] = {}
        # Answers of incarnations that are gone already; the gateway must not mind them.
        self._late: list[tuple[ModelWorker, worker_pb2.WorkerEvent]] = []
        # What was asked of a gateway that crashed, and will be asked again.
        self._unanswered: list[tuple[Request, Tenant]] = []
        self._start_gateway()
        self._actions: list[tuple[Callable[[], object], float]] = [
            (self._submit, 40),
            (self._take, 20),
            (self._step, 20),
            (self._deliver, 20),
            (self._write, disk_speed),
            (self._work, 20),
            (self._cancel, 2.5),
            (self._expire, 2),
            (self._tick, 4),
            (self._pass_time, 5),
            (self._pause, 0.7),
            (self._crash, 1.5),
            (self._notice, 3),
            (self._connect, 15),
            (self._drain, 0.5),
            (self._replace, 3),
            (self._forget, 0.6),
            (self._suspect, 0.5),
            (self._deliver_late, 4),
            (self._fail_to_write, 4.0),
            (self._restart_gateway, gateway_crashes),
            (self._start_draining, 0.02),
            (self._replace_weights, self._switches),
        ]

    def run(self) -> None:
        """Anything at any moment; then all comes to rest, and then to an end."""
        for worker_id in self._worker_ids:
            self._start_worker(worker_id)
        for _ in range(self.rng.choice((0, 2, 4))):
            # Most schedules have something to begin with.
            self._submit()
            self._work()
            self._write()
        actions, weights = zip(*self._actions, strict=True)
        for action in self.rng.choices(actions, weights, k=self.rng.choice(EVENTS)):
            action()
        self._settle()
        check_rest(self.dispatcher, self.oracle, self.workers.values())
        self._check_recoverable()
        for tenant in self.tenants:
            self._ask(
                [Release(c.cache_id) for c in self.oracle.caches.values() if c.tenant is tenant], tenant
            )
        self._settle()
        check_end(self.dispatcher, self.workers.values())
        assert not any(t.caches or t.tokens or t.in_flight for t in self.tenants)

    # The gateway.

    def _start_gateway(self) -> None:
        """A gateway without workers, which knows what is on the disk."""
        oracle, rng = self.oracle, self.rng
        self.machine = new_machine(rng, oracle, self._names)
        self.machine.weights.replace(self._weights, continued_from=self._continued)
        oracle.continue_with(self._weights, self._continued)
        self.journal = DiskJournal(self._disk, lambda: self._now_s, self.seen)
        self.dispatcher = WatchedDispatcher(
            self.machine, self.journal, self._send, lambda: self._now_s, oracle, self.trace
        )
        records = list(self._disk.recover())
        for record, wall_s in records:
            self.dispatcher.needed.written(record)
            self.machine.recovering(record, wall_s)
        tenants = {tenant.name: tenant for tenant in self.tenants}
        self.machine.recovered(now_s=self._now_s, wall_s=self._now_s, tenant_of=lambda name: tenants[name])
        check_invariants(self.machine)
        self.dispatcher.check_truth()

    def _restart_gateway(self) -> None:
        """The gateway is killed. Workers die with it, or wait for the next one."""
        self.seen["gateway crash"] += 1
        self.seen["in flight when the gateway crashed"] += len(self.oracle.outstanding)
        self.trace.append(("gateway crash",))
        self.journal.crash(self.rng)
        self._unanswered += self.callers.not_answered(self.oracle.gateway_crashed())
        for tenant in self.tenants:
            tenant.caches = tenant.tokens = tenant.in_flight = 0
        alive = [worker for worker in self.workers.values() if not worker.crashed]
        alive += [worker for worker, _ in self._adopting.values()]
        self._orphans += [worker for worker in alive if self.rng.random() < 0.9]
        for worker in self._orphans:
            # What was on its way to it may have arrived.
            worker.take(self.rng.choice((0, 0, len(worker.inbox))))
            if self.rng.random() < 0.5:
                worker.step()
        # Those with other weights are not taken over.
        self._named.clear()
        crew = self._crew(self._weights)
        served = (w for w in self._orphans if w.weights == self._weights and w.worker_id in crew)
        self._orphans = [worker for worker in served if not worker.crashed]
        self.workers.clear()
        self._adopting.clear()
        self._late.clear()
        self._now_s += self.rng.choice((0.0, 0.1, 5.0))
        self._start_gateway()
        for _ in range(self.rng.choice((0, 2, 6))):
            self._connect()

    def _start_draining(self) -> None:
        self.dispatcher.start_draining()

    def _check_recoverable(self) -> None:
        """A gateway that came now would find all of it."""
        ledger = Ledger(SEGMENT_TOKENS)
        for record, _ in self._disk.recover():
            ledger.apply(record)
        ledger.continue_weights(self._continued, self._weights)
        check_ledger(ledger, self.oracle)

    # Callers.

    def _submit(self) -> None:
        if self._unanswered and self.rng.random() < 0.5:
            request, tenant = self._unanswered.pop(0)
            self.seen["asked again after a gateway crash"] += 1
            if isinstance(request, Append):
                # The new gateway checks it for the weights that it serves.
                request = dataclasses.replace(request, weights=None)
            self._ask([request], tenant)
            return
        if not self.oracle.was_ready and self.rng.random() < 0.8:
            return
        waiting = len(self.oracle.outstanding)
        nothing_to_use = waiting and not self.oracle.caches
        if (nothing_to_use or waiting >= self._patience) and self.rng.random() < 0.9:
            return
        tenant = self.callers.tenant()
        self._ask([self.callers.request(tenant) for _ in range(self.rng.choice((1, 1, 1, 1, 2, 4)))], tenant)

    def _ask(self, requests: Sequence[Request], tenant: Tenant) -> None:
        """Those of one call are submitted together. Most were checked for the weights that they are for."""
        requests = [self._checked(request) for request in requests]
        self.dispatcher.start(requests, lambda *_: None, caller=1, tenant=tenant)

    def _checked(self, request: Request) -> Request:
        if not (self._switches and isinstance(request, Append) and request.weights is None):
            return request
        if self.rng.random() < 0.3:
            return request
        cache = self.oracle.caches.get(request.cache_id)
        # Some know the cache from before, and not that there are other weights now.
        is_mistaken = self.rng.random() < 0.2
        weights = self._weights if is_mistaken or cache is None else cache.weights
        return dataclasses.replace(request, weights=weights)

    def _cancel(self) -> None:
        """Who goes takes back one call, or all of a Session."""
        outstanding = list(self.oracle.outstanding)
        if not outstanding:
            return
        numbers = self.rng.sample(outstanding, min(self.rng.choice((1, 5)), len(outstanding)))
        tickets = [self.dispatcher.ticket_of[number] for number in numbers]
        for ticket in tickets:
            self.seen[f"cancelled while {self.machine.phase_of(ticket)}"] += 1
        self.dispatcher.cancel(tickets)

    # The journal.

    def _write(self) -> None:
        self.journal.write(self.rng.choice((1, 1, 2, 8)))

    def _fail_to_write(self) -> None:
        if self._disk_fails and len(self.journal):
            self.journal.fail(self.rng.choice((1, 1, 8)))

    def _probe(self) -> None:
        """As `keep_time` does while the journal does not work."""
        if not self.machine.admission.journal_works:
            self.dispatcher.probe()

    # Time.

    def _tick(self) -> None:
        self._now_s += _TICK_S
        self._probe()
        if self.machine.num_parked:
            self.dispatcher.tick()

    def _expire(self) -> None:
        self.dispatcher.expire(list(self.machine.index))

    def _pass_time(self) -> None:
        self._now_s += self.rng.choice((0.1, 1.0, 1.0, 6.0))

    def _pause(self) -> None:
        """The process is stopped for a while; then everything is there at once, in any order."""
        self.seen["pause"] += 1
        self._now_s += self.rng.choice((2.0, 10.0, 60.0))
        arrivals: list[Callable[[], object]] = [
            self._expire,
            self._notice,
            self._write,
            self._tick,
            *[self._cancel, self._submit] * 2,
            *(partial(self._deliver_all, worker) for worker in self.workers.values()),
        ]
        self.rng.shuffle(arrivals)
        for arrival in arrivals:
            arrival()

    # Weights.

    @property
    def _worker_ids(self) -> list[str]:
        """Who is to be there."""
        return self._crew(self._weights)

    def _crew(self, weights: int) -> list[str]:
        weights = self._named.get(weights, weights)
        suffix = f".{weights}" if weights else ""
        return [f"worker-{index}{suffix}" for index in range(self._num_workers)]

    def _replace_weights(self) -> None:
        crew = self._crew(self._weights)
        if not all(worker_id in self.workers for worker_id in crew):
            return
        before, previous = self._weights, self.rng.choices([*PreviousCaches], (3, 4, 3))[0]
        self._weights += 1
        if previous is PreviousCaches.END:
            self._continued = self._weights
        if self.rng.random() < 0.1:
            self.seen["gateway crash between a switch that is written down and its making"] += 1
            self._restart_gateway()
            return
        self._named[self._weights] = self._named.get(before, before)
        self.seen[f"weights replaced, caches: {previous.name}"] += 1
        self.seen["in flight when weights were replaced"] += len(self.oracle.outstanding)
        workers = [self.workers[worker_id] for worker_id in crew]
        for worker in workers:
            # Some of what was on its way may have been computed, and is answered too late.
            worker.take(self.rng.choice((0, len(worker.inbox))))
            worker.step()
            self._late.extend((worker, event) for event in worker.outbox)
            worker.replace_weights(self._weights, keep_sequences=previous is PreviousCaches.KEEP_KV)
        views = [worker.view(MAX_SEQ_LEN) for worker in workers]
        self.dispatcher.weights_replaced(self._weights, views, previous)
        for _ in range(self.rng.choice((0, 3, 6))):
            # Of caches from before, too.
            self._submit()
            self._work()
            self._write()

    # Workers.

    def _any_worker(self) -> ModelWorker | None:
        return self.rng.choice(list(self.workers.values())) if self.workers else None

    def _connect(self) -> None:
        """A worker that is missing comes: a new one, or one that has outlived the gateway before this one."""
        missing = [worker_id for worker_id in self._worker_ids if worker_id not in self.workers]
        if not missing:
            return
        worker_id = self.rng.choice(missing)
        # After a replacement in place the weights are others, and the names are not.
        fitting = (w for w in self._orphans if w.weights == self._weights)
        orphans = [worker for worker in fitting if worker.worker_id == worker_id]
        if worker_id in self._adopting:
            self._adopted(worker_id)
        elif orphans and self.rng.random() < self._adoption:
            worker = self.rng.choice(orphans)
            self._orphans.remove(worker)
            self._adopting[worker_id] = (worker, self.dispatcher.caches.claims(worker.holdings()))
        else:
            self._start_worker(worker_id)

    def _adopted(self, worker_id: str) -> None:
        worker, claims = self._adopting.pop(worker_id)
        kept = worker.adopt(claims)
        self._last_epoch += 1
        worker.epoch = self._last_epoch
        self._is_ready(worker, kept)

    def _start_worker(self, worker_id: str) -> None:
        self._last_epoch += 1
        worker = ModelWorker(worker_id, self._last_epoch, self._pool, self.rng, self.seen)
        worker.faults = self._faults
        worker.weights = self._weights
        self._is_ready(worker, {})

    def _is_ready(self, worker: ModelWorker, kept: dict[int, int]) -> None:
        self.workers[worker.worker_id] = worker
        self.dispatcher.worker_ready(worker.view(MAX_SEQ_LEN), kept)

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

    def _work(self) -> None:
        """A worker does all there is to do, and says so."""
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            self._deliver_all(worker)

    def _deliver_events(self, worker: ModelWorker, count: int) -> None:
        """A message of a worker arrives."""
        self._answer(worker, self.dispatcher.take_answers(worker, count))

    def _deliver_all(self, worker: ModelWorker) -> None:
        """One that has worked on meanwhile has answered everything, unless it was found to be gone."""
        if self.workers.get(worker.worker_id) is not worker:
            return
        if not worker.crashed:
            worker.work()
        self._deliver_events(worker, len(worker.outbox))

    def _answer(self, worker: ModelWorker, response: worker_pb2.ConnectResponse) -> None:
        self.dispatcher.worker_answered(
            worker.worker_id, worker.epoch, wire.to_events(response), response.pages_available
        )

    def _deliver_late(self) -> None:
        """What a fenced worker still says changes nothing. Op ids are never reused."""
        if self._late:
            worker, event = self._late.pop()
            self.seen["late answer"] += 1
            self._answer(worker, worker_pb2.ConnectResponse(events=together([event], worker.plain)))
            self.check_late()

    def check_late(self) -> None:
        assert not self.dispatcher.effects, "an answer from the grave"

    def _crash(self) -> None:
        """A process ends, or it is silent until it is found to be and killed."""
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
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
        for phase, mine in self.machine.phases_beside(worker.epoch):
            self.seen[f"{phase} when {'its' if mine else 'a'} worker died"] += 1
        killed_by = worker.killed_by
        if not killed_by and self.rng.random() < 0.5:
            # It was only not heard: it has gone on.
            worker.work()
        self._late.extend((worker, event) for event in worker.outbox)
        crashed = bool(killed_by) or self.rng.random() < 0.7
        self.dispatcher.worker_lost(worker.worker_id, worker.epoch, crashed=crashed, culprit=killed_by)

    def _drain(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            self.seen["drain"] += 1
            self.dispatcher.worker_draining(worker.worker_id, worker.epoch)

    def _replace(self) -> None:
        """Those that drain and have nothing more to do are stopped."""
        for worker in list(self.workers.values()):
            view = self.machine.worker(worker.worker_id, worker.epoch)
            if (
                view is not None
                and view.draining
                and self.dispatcher.caches.is_drained(worker.worker_id, worker.epoch)
            ):
                self.seen["drained"] += 1
                self._lose(worker)

    def _forget(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.crashed:
            worker.forget()

    def _suspect(self) -> None:
        worker = self._any_worker()
        if worker is not None:
            suspect = self.rng.random() < 0.5
            self.dispatcher.worker_suspected(worker.worker_id, worker.epoch, suspect=suspect)

    def _send(self, commands: Sequence[Send]) -> None:
        for worker_id, epoch, command in commands:
            worker = self.workers[worker_id]
            assert worker.epoch == epoch
            self.dispatcher.expect(worker, command)
            worker.inbox.append(message_of(command))

    # The end.

    def _settle(self) -> None:
        """Nothing goes wrong any more, but for what is poison: everybody is answered, and in time."""
        end_s = self._now_s + SETTLED_S
        faults = Faults(step=0.0, control=0.0, timeout=0.0, poison=self._faults.poison)
        while True:
            self._notice()
            self._replace()
            for worker_id in self._worker_ids:
                if worker_id not in self.workers:
                    self._connect()
            self._probe()
            self.journal.write(len(self.journal))
            for worker in list(self.workers.values()):
                worker.faults = faults
                self._deliver_all(worker)
            busy = self.machine.operations_in_flight or len(self.journal)
            workers = self.workers.values()
            if not busy and len(workers) == len(self._worker_ids) and all(w.idle for w in workers):
                break
            assert self._now_s < end_s, "somebody waits for ever"
            self._tick()
        assert not self.oracle.outstanding, "every caller is answered"


def new_machine(rng: random.Random, oracle: Oracle, names: Iterator[int] | None = None) -> WatchedMachine:
    """A machine with the limits that the oracle knows, and names and seeds that can be had again."""
    names = names or itertools.count(1)
    limits = Limits(
        oracle.queue_limit,
        default_lease_s=oracle.default_lease_s,
        max_lease_s=MAX_LEASE_S,
        max_caches=oracle.cache_limit,
        max_journal_bytes=oracle.budget.limit_bytes,
        max_wait_s=MAX_WAIT_S,
    )
    return Machine(limits, new_cache_id=lambda: f"kv{next(names)}", new_seed=lambda: rng.randrange(1 << 32))
