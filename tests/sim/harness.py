"""A gateway in miniature for example tests, with model workers that make no mistakes.

Nothing happens until a test says so: `submit` sends, `work` lets the workers answer.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from quire.v1 import types_pb2

from service.caches.admission import Limits
from service.caches.effects import Send
from service.caches.machine import CacheMachine
from service.caches.records import Record
from service.caches.requests import (
    Append,
    Appended,
    AppendKind,
    Handles,
    PreviousCaches,
    Release,
    Released,
    Request,
)
from service.dispatcher import Dispatcher, Outcome, Outcomes
from service.errors import QuireError
from service.journal.base import Journal, OnCommitted
from service.pool import wire
from tests.sim.appends import append
from tests.sim.invariants import check_invariants
from tests.sim.model_worker import Faults, ModelWorker, Pool, message_of, together
from workers.common import worker_pb2

MAX_SEQ_LEN = 64


class FailingJournal(Journal):
    """Its disk writes at once; while `fails`, nothing; while `is_slow`, when it is told to."""

    def __init__(self) -> None:
        self.fails = False
        self.is_slow = False
        self.written: list[Record] = []
        self._waiting: list[tuple[Sequence[Record], OnCommitted]] = []

    def commit(self, records: Sequence[Record], on_committed: OnCommitted) -> None:
        """See `Journal.commit`."""
        self._waiting.append((records, on_committed))
        if not self.is_slow:
            self.settle()

    def settle(self) -> None:
        """What was given so far is durable, or has failed."""
        waiting, self._waiting = self._waiting, []
        for records, on_committed in waiting:
            if not self.fails:
                self.written.extend(records)
            on_committed(not self.fails)


class Gateway:
    """The gateway but for its sockets, driven by hand. `now_s` is the clock."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        workers: int = 1,
        pool: Pool | None = None,
        journal: Journal | None = None,
        machine: CacheMachine | None = None,
    ) -> None:
        names = itertools.count(1)
        self.now_s = 0.0
        self.pool = pool or Pool(100)
        self.disk = FailingJournal()
        if machine is None:
            machine = CacheMachine(
                limits or Limits(), new_cache_id=lambda: f"kv{next(names)}", new_seed=lambda: 7
            )
        self.machine = machine
        # The seconds that each durable commit took.
        self.commits_s: list[float] = []
        self.dispatcher = Dispatcher(
            self.machine,
            journal or self.disk,
            self._send,
            clock_s=lambda: self.now_s,
            commits=[self.commits_s.append],
        )
        self.workers: dict[str, ModelWorker] = {}
        # By ticket, in the order in which they came.
        self.replies: dict[int, Outcome] = {}
        self.sent: list[worker_pb2.WorkerCommand] = []
        self._last_epoch = 0
        for index in range(workers):
            self.start_worker(f"worker-{index}")

    def start_worker(
        self,
        worker_id: str,
        kept: Mapping[int, int] | None = None,
        sequences: Mapping[int, list[int]] | None = None,
        weights: int = 0,
    ) -> ModelWorker:
        """`kept`: what the gateway takes over of its `sequences`."""
        self._last_epoch += 1
        worker = ModelWorker(worker_id, self._last_epoch, self.pool, random.Random(0), Counter())
        worker.faults = Faults(step=0.0, control=0.0, timeout=0.0)
        worker.weights = weights
        worker.sequences.update(sequences or {})
        self.workers[worker_id] = worker
        self.dispatcher.worker_ready(worker.view(MAX_SEQ_LEN), kept)
        return worker

    def replace_weights(self, weights: int, previous: PreviousCaches) -> None:
        """All workers put other weights into place."""
        for worker in self.workers.values():
            worker.replace_weights(weights, keep_sequences=previous is PreviousCaches.KEEP_KV)
        views = [worker.view(64) for worker in self.workers.values()]
        self.dispatcher.weights_replaced(weights, views, previous)

    def lose_worker(self, worker_id: str = "worker-0", *, crashed: bool = True) -> None:
        worker = self.workers.pop(worker_id)
        self.dispatcher.worker_lost(worker_id, worker.epoch, crashed=crashed)
        check_invariants(self.machine)

    def wait(self, seconds: float) -> None:
        """Time passes; what is parked is looked at."""
        self.now_s += seconds
        self.machine.tick(self.now_s)
        self.dispatcher.cancel(())
        check_invariants(self.machine)

    @property
    def worker(self) -> ModelWorker:
        (worker,) = self.workers.values()
        return worker

    # Callers.

    def submit(self, *requests: Request) -> list[int]:
        """Hands requests in together. Their commands wait in the worker's inbox. Returns the tickets."""
        early: dict[int, Outcome] = {}
        tickets: list[int] = []

        def on_outcomes(found: Outcomes) -> None:
            for index, outcome in found:
                if tickets:
                    assert tickets[index] not in self.replies
                    self.replies[tickets[index]] = outcome
                else:
                    early[index] = outcome

        tickets = self.dispatcher.start(requests, on_outcomes, caller=1)
        self.replies.update((tickets[index], outcome) for index, outcome in early.items())
        check_invariants(self.machine)
        return tickets

    def ask(self, request: Request) -> int:
        """Hands one request in."""
        (ticket,) = self.submit(request)
        return ticket

    def cancel(self, *tickets: int) -> None:
        self.dispatcher.cancel(tickets)
        check_invariants(self.machine)

    def run(self, request: Request) -> Outcome:
        """The outcome of a request that is alone in the world."""
        ticket = self.ask(request)
        self.work()
        return self.replies[ticket]

    def append(self, request: Append) -> Appended:
        outcome = self.run(request)
        assert isinstance(outcome, Appended), outcome
        return outcome

    def handles(self, request: Request) -> Handles:
        outcome = self.run(request)
        assert isinstance(outcome, Handles), outcome
        return outcome

    def release(self, cache_id: str) -> bool:
        outcome = self.run(Release(cache_id))
        assert isinstance(outcome, Released), outcome
        return outcome.released

    def refusal(self, request: Request) -> QuireError:
        outcome = self.run(request)
        assert isinstance(outcome, QuireError), outcome
        return outcome

    def create(self, *token_ids: int, request_id: str = "", lease_s: float | None = None) -> str:
        """A new cache."""
        return self.append(prefill(*token_ids, request_id=request_id, lease_s=lease_s)).cache_id

    def reason(self, ticket: int) -> str:
        """Why an operation was refused."""
        outcome = self.replies[ticket]
        assert isinstance(outcome, QuireError), outcome
        return outcome.reason

    def tokens(self, cache_id: str) -> list[int]:
        """What the ledger holds of a cache."""
        (state,) = [state for state in self.machine.ledger if state.cache_id == cache_id]
        return list(state.tokens.copy())

    def held(self) -> list[list[int]]:
        """What the workers hold."""
        return [tokens for worker in self.workers.values() for tokens in worker.sequences.values()]

    # The other side.

    def work(self) -> None:
        """Everything under way is done and answered."""
        while not all(worker.idle for worker in self.workers.values()):
            for worker in self.workers.values():
                worker.take(len(worker.inbox))
                while worker.has_jobs:
                    worker.step(all_jobs=True)
                self.deliver(worker)

    def deliver(self, worker: ModelWorker) -> None:
        """What a worker has answered arrives, in one message."""
        response = worker_pb2.ConnectResponse(
            events=together(worker.outbox, worker.plain), pages_available=worker.pages_left
        )
        worker.outbox.clear()
        events = wire.to_events(response)
        self.dispatcher.worker_answered(worker.worker_id, worker.epoch, events, response.pages_available)
        check_invariants(self.machine)

    def refuse(self, op_id: int, reason: worker_pb2.WorkerErrorReason) -> None:
        """A worker's error arrives."""
        error = worker_pb2.WorkerError(reason=reason)
        self.worker.outbox.append(worker_pb2.WorkerEvent(op_id=op_id, error=error))
        self.deliver(self.worker)

    def _send(self, commands: Sequence[Send]) -> None:
        for worker_id, _, command in commands:
            message = message_of(command)
            self.sent.append(message)
            self.workers[worker_id].inbox.append(message)


def prefill(
    *token_ids: int,
    cache_id: str = "",
    position: int | None = None,
    request_id: str = "",
    lease_s: float | None = None,
) -> Append:
    return append(AppendKind.PREFILL, cache_id, token_ids, position, request_id=request_id, lease_s=lease_s)


def decode(
    cache_id: str,
    token_id: int,
    position: int | None = None,
    output: types_pb2.OutputOptions | None = None,
) -> Append:
    return append(AppendKind.DECODE, cache_id, (token_id,), position, output=output)


def verify(cache_id: str, *token_ids: int, position: int | None = None, accept: bool = True) -> Append:
    mode = types_pb2.VERIFY_ACCEPT_GREEDY if accept else types_pb2.VERIFY_ACCEPT_UNSPECIFIED
    return append(AppendKind.VERIFY, cache_id, token_ids, position, rows=len(token_ids), accept=mode)
