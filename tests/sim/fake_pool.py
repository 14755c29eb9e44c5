"""Workers for the real supervisor, in this process: a launcher that often fails, processes, and links.

A worker is a `ModelWorker` behind a link. It loads for a while, then it is ready; it is asked how it is and
says so, unless it hangs. What it was told otherwise waits until the schedule lets it work.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from quire.v1 import types_pb2

from service.caches.effects import Claim
from service.config import Config
from service.pool.link import Stream
from service.pool.worker_directory import Epochs
from tests.sim.model_worker import ModelWorker, Pool, one_by_one
from tests.sim.toy_model import VOCAB
from tests.sim.watched import WatchedDispatcher
from workers.common import worker_pb2

# The most that a worker takes to load, and that it needs to answer how it is.
LOAD_S, ANSWER_S = 2.0, 0.01
# As the supervisor's: the shortest time between a failure and the next attempt, and the longest.
LEAST_BACKOFF_S, MOST_BACKOFF_S = 0.25, 10.0

MODEL = types_pb2.ModelDescription(fingerprint="one", vocab_size=VOCAB)

OnResponse: TypeAlias = Callable[[worker_pb2.ConnectResponse], None]


class NeverOpened:
    """An endpoint, by which its `FakeLink` is known."""

    host_address = ""

    def __init__(self, address: str) -> None:
        self.address = address

    async def open(self, max_bytes: int) -> Stream:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Processes:
    """One incarnation, from its start to its end."""

    def __init__(self, address: str, worker: ModelWorker, pool: FakeLauncher) -> None:
        self.epoch = worker.epoch
        self.endpoint = NeverOpened(address)
        self.pid = 1000 + worker.epoch
        self.is_outdated = False
        self.worker = worker
        self.link: FakeLink | None = None
        # Says nothing and does nothing, until it is killed or goes on.
        self.hangs = False
        self._went_on_s = -1.0
        self.is_ready = False
        self._pool = pool
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def has_ended(self) -> bool:
        return self._exit.done()

    @property
    def answers(self) -> bool:
        """Whether it is there to say anything."""
        return self.works and not self.is_cut

    @property
    def hung(self) -> bool:
        """Whether it hangs, or may have been judged at this moment, just before it went on."""
        return self.hangs or self._went_on_s == asyncio.get_running_loop().time()

    @property
    def works(self) -> bool:
        """Whether it computes."""
        return self.is_ready and not (self.hangs or self.has_ended)

    @property
    def is_cut(self) -> bool:
        """Whether nothing arrives, here or there. See `fake_leases`."""
        return False

    @property
    def next_weights(self) -> int:
        """What it puts into place, when it is told to."""
        return self._pool.next_weights

    def load_s(self) -> float:
        """How long it reads weights."""
        return self._pool.rng.uniform(0.1, LOAD_S)

    def refuses(self) -> bool:
        """Whether it cannot use weights that it has read."""
        return self._pool.rng.random() < 0.1

    def hang(self) -> None:
        self.hangs = True

    def go_on(self) -> None:
        """It hangs no more, and says what it was asked meanwhile."""
        self.hangs = False
        self._went_on_s = asyncio.get_running_loop().time()
        if self.link is not None:
            self.link.answer()

    def exit(self, status: int) -> None:
        """Its process ends."""
        self.worker.crashed = True
        if not self._exit.done():
            self._exit.set_result(status)
            self._pool.has_ended(self)

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        self.exit(-9)

    def given_back(self) -> None:
        """It is told that nobody needs it."""

    def detach(self) -> None:
        raise AssertionError("workers are never detached here")

    async def stop(self, *, grace_s: float) -> int:
        assert self.hung or grace_s, "one that is well was judged dead"
        self.exit(0 if grace_s else -9)
        return await self._exit

    def holdings(self) -> Mapping[int, int]:
        """What it has, when it is ready, for a gateway that comes back."""
        return {}

    def become_ready(self) -> None:
        """It has loaded."""
        if self._exit.done() or self.link is None:
            return
        self.is_ready = True
        pool = self._pool
        ready = worker_pb2.WorkerReady(
            pages_total=pool.pages.pages,
            executor=types_pb2.ExecutorCapabilities(
                page_size_tokens=pool.pages.page_tokens, kv_capacity_tokens=pool.capacity_tokens
            ),
            model=MODEL,
        )
        for number, length in self.holdings().items():
            ready.holdings.add(sequence=number, length=length)
        self.link.deliver(worker_pb2.ConnectResponse(events=[worker_pb2.WorkerEvent(ready=ready)]))
        self.link.answer()


class FakeLink:
    """Stands for the stream to one incarnation. What is sent lies in the worker's inbox."""

    def __init__(self, processes: Processes, on_response: OnResponse) -> None:
        self.closed = asyncio.Event()
        self._processes = processes
        self._on_response = on_response
        # Snapshots and adoptions that it has not answered.
        self._asked: list[worker_pb2.WorkerCommand] = []
        # What was sent while nothing arrived.
        self.under_way: list[worker_pb2.WorkerCommand] = []
        processes.link = self

    def send(self, request: worker_pb2.ConnectRequest) -> None:
        if self.closed.is_set():
            return
        if self._processes.is_cut:
            self.under_way.extend(request.commands)
            return
        for command in request.commands:
            self.arrive(command)

    def arrive(self, command: worker_pb2.WorkerCommand) -> None:
        """A command has come to the worker."""
        if command.HasField("adopt") or command.HasField("snapshot"):
            self._asked.append(command)
            asyncio.get_running_loop().call_later(ANSWER_S, self.answer)
        elif command.HasField("replace_weights"):
            self._replace_weights(command)
        else:
            self._processes.worker.inbox.extend(one_by_one(command))

    def _replace_weights(self, command: worker_pb2.WorkerCommand) -> None:
        """It begins to read other weights, or puts them into place at once."""
        processes, step = self._processes, command.replace_weights
        if step.HasField("apply"):
            processes.worker.replace_weights(processes.next_weights, keep_sequences=step.keep_sequences)
        elif step.HasField("read"):
            self._asked.append(command)
            asyncio.get_running_loop().call_later(processes.load_s(), self.answer)

    def answer(self) -> None:
        """It says how it is, and what it keeps, if it can and was asked."""
        worker = self._processes.worker
        if self.closed.is_set() or not self._processes.answers:
            return
        asked, self._asked = self._asked, []
        for command in asked:
            event = worker_pb2.WorkerEvent(op_id=command.op_id)
            if command.HasField("adopt"):
                claims = [Claim(item.sequence, item.length, item.digest) for item in command.adopt.items]
                event.adopted.kept.extend(worker.adopt(claims))
                self.deliver(worker_pb2.ConnectResponse(events=[event]))
            elif command.HasField("replace_weights"):
                if self._processes.refuses():
                    event.error.detail = "planted"
                else:
                    event.weights_read.model.CopyFrom(MODEL)
                self.deliver(worker_pb2.ConnectResponse(events=[event]))
            else:
                event.snapshot.SetInParent()
                self.deliver(worker_pb2.ConnectResponse(events=[event], pages_available=worker.pages_left))

    def deliver(self, response: worker_pb2.ConnectResponse) -> None:
        """A message of the worker arrives."""
        if not self.closed.is_set():
            self._on_response(response)

    def break_off(self) -> None:
        """The stream ends, as by a fault of the network."""
        self.closed.set()

    async def close(self, *, give_back: bool) -> None:
        if give_back and not self.closed.is_set():
            self._processes.given_back()
        self.closed.set()


class FakeLauncher:
    """Starts workers as badly as the schedule wants. Owner of what was started."""

    def __init__(self, rng: random.Random, pages: Pool, capacity_tokens: int, seen: Counter[str]) -> None:
        self.pages = pages
        self.capacity_tokens = capacity_tokens
        # How often starting fails.
        self.failing = 0.0
        self.running: dict[str, Processes] = {}
        # What a new worker loads, and what those that have read other weights put into place.
        self.served_weights = self.next_weights = 0
        self.closed = False
        self._epochs = Epochs(None)
        self.rng = rng
        self._seen = seen
        self._by_endpoint: dict[NeverOpened, Processes] = {}
        # By worker: how often in a row it has failed, and when that was.
        self._failures: Counter[str] = Counter()
        self._ended_s: dict[str, float] = {}
        self._served = False

    async def adopt(self, configs: Sequence[worker_pb2.WorkerConfig]) -> Mapping[str, Processes]:
        return {}

    async def start(self, config: worker_pb2.WorkerConfig) -> Processes:
        epoch, worker_id = await self._epochs.next(), config.worker_id
        assert worker_id not in self.running, "the one before it is killed first"
        self._check_backoff(worker_id)
        # One that has never served may not fail too often in a row: the gateway would end.
        patient = self._served or self._failures[worker_id] < 3
        fate = self.rng.random() if patient else 1.0
        if fate < self.failing / 2:
            self._failed(worker_id, "spawn refused")
            raise OSError(errno.EAGAIN, "resource temporarily unavailable")
        processes = self.make(worker_id, epoch)
        self.running[worker_id] = self._by_endpoint[processes.endpoint] = processes
        loop, load_s = asyncio.get_running_loop(), self.rng.uniform(0.1, LOAD_S)
        if fate < self.failing * 0.6:
            self._seen["never loads"] += 1
            processes.hang()
        elif fate < self.failing:
            self._seen["death while loading"] += 1
            loop.call_later(load_s, processes.exit, 1)
        else:
            loop.call_later(load_s, processes.become_ready)
        return processes

    def close(self) -> None:
        self.closed = True

    def make(self, worker_id: str, epoch: int) -> Processes:
        """A new incarnation."""
        worker = ModelWorker(worker_id, epoch, self.pages, self.rng, self._seen)
        worker.weights = self.served_weights
        return Processes(f"sim:{worker_id}-{epoch}", worker, self)

    def unheard(self) -> list[ModelWorker]:
        """Workers that compute without a gateway. See `fake_leases`."""
        return []

    def link(self, endpoint: NeverOpened, _config: Config, on_response: OnResponse) -> FakeLink:
        """As WorkerLink is made."""
        return FakeLink(self._by_endpoint[endpoint], on_response)

    def has_ended(self, processes: Processes) -> None:
        """Notes an end."""
        worker_id = processes.worker.worker_id
        del self.running[worker_id]
        if processes.is_ready:
            self._served, self._failures[worker_id] = True, 0
            self._ended_s.pop(worker_id, None)
        else:
            self._failed(worker_id, "worker never ready")

    def has_failed(self, worker_id: str) -> bool:
        """Whether its last start came to nothing."""
        return self._failures[worker_id] > 0

    def _failed(self, worker_id: str, how: str) -> None:
        self._seen[how] += 1
        self._failures[worker_id] += 1
        self._ended_s[worker_id] = asyncio.get_running_loop().time()

    def _check_backoff(self, worker_id: str) -> None:
        """One that does not come is tried again, and not at once: after twice as long each time."""
        failures = self._failures[worker_id]
        if failures:
            waited_s = asyncio.get_running_loop().time() - self._ended_s[worker_id]
            least_s = min(LEAST_BACKOFF_S * 2 ** (failures - 1), MOST_BACKOFF_S)
            assert waited_s >= least_s - 1e-6, "hammered"
            self._seen["tried again"] += 1


class WorkFloor:
    """What the workers do when the schedule lets them, and what befalls them."""

    def __init__(
        self, launcher: FakeLauncher, dispatcher: WatchedDispatcher, rng: random.Random, seen: Counter[str]
    ) -> None:
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._rng = rng
        self._seen = seen

    def take(self) -> None:
        """One takes commands off its stream."""
        worker = self._any_worker()
        if worker is not None:
            worker.take(self._rng.randint(1, 6))

    def step(self) -> None:
        """One runs a step."""
        worker = self._any_worker()
        if worker is not None:
            worker.step()

    def deliver(self) -> None:
        """A message of one arrives."""
        processes = self._any()
        if processes is not None and processes.worker.outbox:
            self._answer(processes, self._rng.randint(1, 4))

    def work(self) -> None:
        """Each does all that it has to do, and says so."""
        for processes in list(self._launcher.running.values()):
            if processes.answers:
                processes.worker.work()
                if processes.worker.outbox:
                    self._answer(processes, len(processes.worker.outbox))

    def crash(self) -> None:
        """The process of one ends, or its stream breaks."""
        processes = self._any()
        if processes is None or processes.link is None:
            return
        self._seen["crash"] += 1
        if self._rng.random() < 0.7:
            processes.exit(-11)
        else:
            processes.link.break_off()

    def hang(self) -> None:
        """One says and does nothing any more."""
        processes = self._any()
        if processes is not None:
            self._seen["hang"] += 1
            processes.hang()

    def go_on(self) -> None:
        """Those that hang do so no more."""
        for processes in list(self._launcher.running.values()):
            if processes.hangs and processes.is_ready:
                processes.go_on()

    def _any(self) -> Processes | None:
        working = [p for p in self._launcher.running.values() if p.answers]
        return self._rng.choice(working) if working else None

    def _any_worker(self) -> ModelWorker | None:
        """One that computes, whether the gateway hears of it or not."""
        working = [p.worker for p in self._launcher.running.values() if p.works]
        working += self._launcher.unheard()
        return self._rng.choice(working) if working else None

    def _answer(self, processes: Processes, count: int) -> None:
        if processes.link is None or processes.link.closed.is_set():
            # What is said to nobody, nobody has heard.
            return
        processes.link.deliver(self._dispatcher.take_answers(processes.worker, count))
