"""A gateway in miniature for example tests: the table, a journal, and model workers that make no mistakes.

Nothing happens until a test says so: `submit` sends, `work` lets the workers answer.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

from quire.v1 import types_pb2, worker_pb2

from service.caches.requests import (
    Append,
    AppendResult,
    HandlesResult,
    Kind,
    Reply,
    Request,
    Result,
    Rows,
    Send,
    Write,
)
from service.caches.table import CacheTable, Limits
from service.errors import QuireError
from service.journal.memory import MemoryJournal
from tests.sim.model_worker import Faults, ModelWorker

MAX_SEQ_LEN = 64


class Gateway:
    """The table with everything around it, driven by hand. `now_s` is the clock."""

    def __init__(self, limits: Limits | None = None, *, workers: int = 1) -> None:
        names = itertools.count(1)
        self.now_s = 0.0
        self.journal = MemoryJournal()
        self.table = CacheTable(
            limits or Limits(), new_cache_id=lambda: f"kv{next(names)}", new_seed=lambda: 7
        )
        self.workers: dict[str, ModelWorker] = {}
        self.replies: dict[int, Result | QuireError] = {}
        self.sent: list[worker_pb2.WorkerCommand] = []
        self._last_epoch = 0
        for index in range(workers):
            self.start_worker(f"worker-{index}")

    def start_worker(self, worker_id: str) -> ModelWorker:
        self._last_epoch += 1
        worker = ModelWorker(worker_id, self._last_epoch, 100, random.Random(0), Counter())
        worker.faults = Faults(step=0.0, control=0.0, timeout=0.0)
        self.workers[worker_id] = worker
        self.table.worker_ready(worker_id, worker.epoch, worker.pages, MAX_SEQ_LEN)
        return worker

    def lose_worker(self, worker_id: str = "worker-0") -> None:
        worker = self.workers.pop(worker_id)
        self.table.worker_lost(worker_id, worker.epoch)
        self.pump()

    @property
    def worker(self) -> ModelWorker:
        (worker,) = self.workers.values()
        return worker

    # Callers.

    def submit(self, request: Request) -> int:
        """Hands a request in; its commands are with the worker, which has not looked at them yet."""
        ticket = self.table.submit(request, self.now_s)
        self.pump()
        return ticket

    def cancel(self, ticket: int) -> None:
        self.table.cancel(ticket)
        self.pump()

    def release(self, cache_id: str) -> bool:
        released = self.table.release(cache_id)
        self.pump()
        return released

    def run(self, request: Request) -> Result | QuireError:
        """The outcome of a request that is alone in the world."""
        ticket = self.submit(request)
        self.work()
        return self.replies[ticket]

    def step(self, request: Append) -> AppendResult:
        outcome = self.run(request)
        assert isinstance(outcome, AppendResult), outcome
        return outcome

    def handles(self, request: Request) -> HandlesResult:
        outcome = self.run(request)
        assert isinstance(outcome, HandlesResult), outcome
        return outcome

    def refusal(self, request: Request) -> QuireError:
        outcome = self.run(request)
        assert isinstance(outcome, QuireError), outcome
        return outcome

    def create(self, *token_ids: int, request_id: str = "", lease_s: float | None = None) -> str:
        """A new cache."""
        handle = self.step(prefill(*token_ids, request_id=request_id, lease_s=lease_s)).handle
        assert handle is not None
        return handle.cache_id

    def reason(self, ticket: int) -> str:
        """Why an operation was refused."""
        outcome = self.replies[ticket]
        assert isinstance(outcome, QuireError), outcome
        return outcome.reason

    def tokens(self, cache_id: str) -> list[int]:
        """What the journal holds of a cache."""
        return list(self.journal.token_ids(cache_id))

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
        """What a worker has answered arrives."""
        while worker.outbox:
            event = worker.outbox.popleft()
            if event.WhichOneof("event") == "forward":
                self.table.forward_done(event.op_id, event.forward, self.now_s)
            elif event.WhichOneof("event") == "done":
                self.table.control_done(event.op_id, self.now_s)
            else:
                self.refuse(event.op_id, event.error.reason)
        self.pump()

    def refuse(self, op_id: int, reason: int) -> None:
        """A worker's error arrives."""
        missing = reason == worker_pb2.WORKER_ERROR_REASON_KV_MISSING
        self.table.command_failed(op_id, QuireError("refused"), kv_missing=missing)
        self.pump()

    def pump(self) -> None:
        for effect in self.table.take_effects():
            match effect:
                case Write(record):
                    self.journal.append((record,))
                case Reply(ticket, outcome):
                    assert ticket not in self.replies
                    self.replies[ticket] = outcome
                case Send(worker_id, _, command):
                    self.sent.append(command)
                    self.workers[worker_id].inbox.append(command)
        self.table.check_invariants()


def prefill(
    *token_ids: int,
    cache_id: str = "",
    position: int | None = None,
    request_id: str = "",
    lease_s: float | None = None,
) -> Append:
    return Append(Kind.PREFILL, cache_id, list(token_ids), position, request_id=request_id, lease_s=lease_s)


def decode(
    cache_id: str,
    token_id: int,
    position: int | None = None,
    output: types_pb2.OutputOptions | None = None,
) -> Append:
    return Append(Kind.DECODE, cache_id, (token_id,), position, output=output)


def verify(cache_id: str, *token_ids: int, position: int | None = None, accept: bool = True) -> Append:
    mode = types_pb2.VERIFY_ACCEPT_GREEDY if accept else types_pb2.VERIFY_ACCEPT_UNSPECIFIED
    return Append(Kind.VERIFY, cache_id, list(token_ids), position, rows=Rows.ALL, accept=mode)
