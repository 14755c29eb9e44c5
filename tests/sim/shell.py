"""One seeded schedule of the gateway but its sockets: the supervisor, sessions, leases, in virtual time.

Workers die, hang and fail to start; callers do not read; the process is stopped for seconds, and what arrived
meanwhile is there at once. The oracle of the other schedules stands at the dispatcher's inputs.

python -m tests.sim --shell --seeds 4711     # one again, with its trace if it fails
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from quire.v1 import admin_pb2

from service.adapters.registry import Adapters
from service.api.server_state import ServerState
from service.caches.effects import Send
from service.caches.requests import PreviousCaches, Release
from service.config import Config
from service.errors import LoadFailed, Loading, NoWorker, StorageUnavailable
from service.pool import incarnation as incarnation_module
from service.pool import wire
from service.pool.model_versions import ModelVersion, ModelVersions
from service.pool.rolling_restart import RollingRestart
from service.pool.supervisor import Supervisor
from service.runtimes.loading import WeightsLoader
from tests.sim.callers import Callers
from tests.sim.disk import Disk, DiskJournal
from tests.sim.fake_leases import LeasingLauncher
from tests.sim.fake_pool import FakeLauncher, WorkFloor
from tests.sim.oracle import Oracle
from tests.sim.peers import Peer
from tests.sim.rest import check_end, check_rest
from tests.sim.simulation import MAX_LEASE_S, MAX_SEQ_LEN, POOLS, new_machine
from tests.sim.virtual_loop import VirtualLoop, innermost
from tests.sim.watched import LARGE_BYTES, WatchedDispatcher

EVENTS = 160
HEARTBEAT_TIMEOUT_S, START_TIMEOUT_S, STALL_S = 4.0, 5.0, 2.0
# By then all that hang are replaced, however long the back-off has become, and another call is answered.
RECOVERED_S = 30.0


class ShellSimulation:
    """Owner of a virtual loop and of all that runs on it. One instance, one schedule."""

    def __init__(self, seed: int, seen: Counter[str]) -> None:
        self.rng = rng = random.Random(seed)
        self.seen = seen
        self.loop = VirtualLoop()
        pages = rng.choice(POOLS)
        capacity_tokens = min(MAX_SEQ_LEN, pages.pages * pages.page_tokens)
        self.oracle = oracle = Oracle(capacity_tokens, MAX_LEASE_S, seen)
        self.callers = Callers(rng, oracle, [oracle.anonymous])
        oracle.queue_limit = rng.choice((6, 1000, 1000, 1000))
        oracle.cache_limit = rng.choice((5, 1000, 1000))
        oracle.budget.limit_bytes = rng.choice((3_000, LARGE_BYTES, LARGE_BYTES))
        # In some schedules workers are on other hosts.
        leases = seed % 3 == 2
        config = Config(
            pool_listen="localhost:1" if leases else "",
            workers=rng.choice((1, 1, 2)),
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            message_timeout_s=STALL_S,
            worker_start_timeout_s=START_TIMEOUT_S,
            max_session_calls=rng.choice((1, 4, 16)),
            max_response_bytes=rng.choice((2048, 8192, 1 << 20)),
            max_unread_bytes=rng.choice((6000, 1 << 20)),
            drain_grace_s=2.0,
        )
        self.machine = new_machine(rng, oracle)
        self.journal = DiskJournal(Disk(), self.loop.time, seen)
        self.trace: deque[object] = deque(maxlen=80)
        self.dispatcher = WatchedDispatcher(
            self.machine, self.journal, self._send, self.loop.time, oracle, self.trace
        )
        launcher_type = LeasingLauncher if leases else FakeLauncher
        self.launcher = launcher_type(rng, pages, capacity_tokens, seen)
        self.launcher.failing = rng.choice((0.0, 0.0, 0.4, 0.8))
        self.floor = WorkFloor(self.launcher, self.dispatcher, rng, seen)
        self.versions = SimulatedVersions("model", config.worker_slots)
        self.versions.launcher, self.versions.rng = self.launcher, rng
        self.supervisor = Supervisor(config, self.versions, self.launcher)
        self.state = ServerState(config, self.versions, Adapters(0))
        self.versions.subscribe(self._on_change)
        self.restarts = RollingRestart(self.supervisor)
        self.loader = SimulatedLoader(self, config)
        self._loads: list[asyncio.Task[Any]] = []
        # In some schedules weights change.
        loads = 1.5 if seed % 3 == 1 else 0.0
        self.peers: list[Peer] = []
        self._unary: list[asyncio.Task[Any]] = []
        # What went wrong where nobody waits for it.
        self._failures: list[BaseException] = []
        self._actions: list[tuple[Callable[[], object], float]] = [
            (self._call_on_session, 30),
            (self._call_alone, 8),
            (self.floor.take, 25),
            (self.floor.step, 25),
            (self.floor.deliver, 25),
            (self._write, 25),
            (self._fail_to_write, 0.5),
            (self._stall, 3),
            (self._read_on, 1),
            (self._leave, 1.5),
            (self.floor.crash, 0.5),
            (self.floor.hang, 0.7),
            (self.floor.go_on, 1.5),
            (self._cut, 1.5 if leases else 0),
            (self._heal, 1.5 if leases else 0),
            (self._pause, 2),
            (self._load_weights, loads),
            (self._leave_load, loads / 3),
            (self._rebuild, loads / 3),
        ]

    def run(self) -> None:
        """Anything at any moment; then all comes to rest, and then to an end."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(incarnation_module, "WorkerLink", self.launcher.link)
            virtual = SimpleNamespace(monotonic=self.loop.time)
            patch.setattr(incarnation_module, "time", virtual)
            self.loop.set_exception_handler(self._on_failure)
            self.loop.run_to_end(self._main())

    async def _main(self) -> None:
        background = [
            self.loop.create_task(self.supervisor.run(self.dispatcher)),
            self.loop.create_task(self.dispatcher.keep_time()),
            self.loop.create_task(self.dispatcher.end_leases()),
        ]
        for task in background:
            task.add_done_callback(self._on_end)
        actions, weights = zip(*self._actions, strict=True)
        for action in self.rng.choices(actions, weights, k=EVENTS):
            action()
            await self._pass_time(self.rng.choice((0, 0, 0, 0.01, 0.1, 0.3)))
        await self._settle()
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        self._raise_failures()
        assert self.launcher.closed and not self.launcher.running, "no worker outlives the gateway"

    async def _pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._raise_failures()
        for peer in self.peers:
            peer.check_bounds()
        self._check_undone()
        held = sum(peer.session._held_bytes for peer in self.peers)
        assert self.state.budgets.answers.used == held, "the answers' budget holds what sessions hold"

    def _check_undone(self) -> None:
        """Nothing is under way of a session that has ended or was given up, but releases."""
        gone = {peer.caller for peer in self.peers if peer.is_cut_off or peer.task.done()}
        for number in self.oracle.outstanding:
            assert self.dispatcher.callers[number] not in gone, "of one who has gone"

    # Callers.

    def _call_on_session(self) -> None:
        usable = [p for p in self.peers if not (p.has_closed or p.task.done())]
        if len(usable) < 2 or self.rng.random() < 0.05:
            peer = Peer(self.dispatcher, self.state, self.loop, self.seen)
            peer.task.add_done_callback(self._on_end)
            self.peers.append(peer)
        else:
            peer = self.rng.choice(usable)
        tenant = self.oracle.anonymous
        peer.send([self.callers.request(tenant) for _ in range(self.rng.choice((1, 1, 2, 6)))])

    def _call_alone(self) -> None:
        tenant = self.oracle.anonymous
        requests = [self.callers.request(tenant) for _ in range(self.rng.choice((1, 1, 3)))]
        task = self.loop.create_task(self.dispatcher.run(requests))
        task.add_done_callback(self._on_end)
        self._unary.append(task)

    # The journal.

    def _write(self) -> None:
        self.journal.write(self.rng.choice((1, 2, 8)))

    def _fail_to_write(self) -> None:
        if len(self.journal):
            self.journal.fail(self.rng.choice((1, 8)))

    def _any_peer(self, *, stalled: bool) -> Peer | None:
        peers = [p for p in self.peers if not p.task.done() and p.is_stalled is stalled]
        return self.rng.choice(peers) if peers else None

    def _stall(self) -> None:
        peer = self._any_peer(stalled=False)
        if peer is not None:
            peer.stall()

    def _read_on(self) -> None:
        peer = self._any_peer(stalled=True)
        if peer is not None:
            peer.go_on()

    def _leave(self) -> None:
        """Somebody goes, or has nothing more to ask."""
        peer = self._any_peer(stalled=self.rng.random() < 0.3)
        choice = self.rng.random()
        if choice < 0.4 and self._unary:
            self.rng.choice(self._unary).cancel()
        elif peer is not None and choice < 0.7:
            peer.disconnect()
        elif peer is not None and not peer.has_closed:
            peer.half_close()

    # Weights.

    def _load_weights(self) -> None:
        self._in_background(self._load(self.rng.choices([*PreviousCaches])[0]))

    async def _load(self, previous: PreviousCaches) -> None:
        try:
            async with contextlib.aclosing(self.loader.replace("model", previous)) as saying:
                phases = [said.phase async for said in saying]
            assert phases[-1] == admin_pb2.LOAD_WEIGHTS_PHASE_SERVING
            self.seen["weights loaded"] += 1
        except (LoadFailed, Loading, NoWorker, StorageUnavailable) as error:
            self.seen[error.reason] += 1

    def _rebuild(self) -> None:
        self._in_background(self._renew())

    async def _renew(self) -> None:
        with contextlib.suppress(NoWorker):
            self.seen["rebuilt"] += len(await self.restarts.replace_ready(self.rng.choice((0.0, 1.0))))

    def _leave_load(self) -> None:
        if self._loads:
            self.rng.choice(self._loads).cancel()

    def _in_background(self, step: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(step)
        task.add_done_callback(self._on_end)
        self._loads.append(task)

    def _on_change(self) -> None:
        self.seen["weights switched"] += self.launcher.served_weights != self.versions.serving.number
        self.launcher.served_weights = self.versions.serving.number

    # Time.

    def _pause(self) -> None:
        """The process is stopped. What the world did meanwhile arrives in one go, before or after timers."""
        self.seen["pause"] += 1
        self.loop.pause(self.rng.choice((0.5, 3.0, 20.0, 60.0)))
        for peer in self.peers:
            peer.pauses += 1
        arrivals: list[Callable[[], object]] = [
            *(peer.go_on for peer in self.peers if peer.is_stalled and self.rng.random() < 0.8),
            *(self._write for _ in range(self.rng.randint(0, 2))),
            *(self.floor.work for _ in range(self.rng.randint(0, 3))),
            *(self._leave for _ in range(self.rng.randint(0, 2))),
            *(self._call_on_session for _ in range(self.rng.randint(0, 2))),
        ]
        self.rng.shuffle(arrivals)
        self._arrive(arrivals, self.rng.randint(0, 3))

    def _arrive(self, arrivals: list[Callable[[], object]], turns: int) -> None:
        """Carries out what has arrived, after so many turns of the loop."""
        if turns:
            self.loop.call_soon(self._arrive, arrivals, turns - 1)
            return
        for arrival in arrivals:
            arrival()

    # Workers.

    def _send(self, commands: Sequence[Send]) -> None:
        for worker_id, epoch, command in commands:
            processes = self.launcher.running.get(worker_id)
            if processes is not None and processes.worker.epoch == epoch:
                self.dispatcher.expect(processes.worker, command)
        wire.send(self.supervisor.links, commands)

    def _cut(self) -> None:
        if isinstance(self.launcher, LeasingLauncher):
            self.launcher.cut_one()

    def _heal(self) -> None:
        if isinstance(self.launcher, LeasingLauncher):
            self.launcher.heal()

    # The end.

    async def _settle(self) -> None:
        """Nothing new goes wrong: all is answered, whoever does not read. Then all read, and leave."""
        self.launcher.failing = 0.0
        self._heal()
        await self._come_to_rest()
        self.seen["a reader who stays away"] += sum(
            peer.is_cut_off and peer.is_stalled for peer in self.peers
        )
        check_rest(self.dispatcher, self.oracle, self._workers)
        for peer in self.peers:
            peer.go_on()
            if not peer.has_closed:
                peer.half_close()
        await self._come_to_rest()
        assert all(peer.task.done() for peer in self.peers) and all(task.done() for task in self._unary)
        assert self.state.budgets.answers.used == 0
        self.dispatcher.start([Release(cache_id) for cache_id in self.oracle.caches], lambda *_: None, 0)
        await self._come_to_rest()
        check_end(self.dispatcher, self._workers)

    async def _come_to_rest(self) -> None:
        """Workers work, and come again, until nothing is under way; and whoever does not read is cut off."""
        end_s = self.loop.time() + RECOVERED_S
        at_rest_s = self.loop.time() + 2 * STALL_S
        while self.loop.time() < (at_rest_s if self._is_at_rest() else end_s):
            waiting = list(self.oracle.outstanding)
            self.floor.work()
            self.journal.write(len(self.journal))
            await self._pass_time(0.25)
            if waiting != list(self.oracle.outstanding):
                # A Session may have many calls behind one another.
                end_s = self.loop.time() + RECOVERED_S
        slots = list(self.versions.slots)
        assert all(slot.ready is not None for slot in slots), "every worker is there again"
        assert self.versions.slots == slots, "and nobody else is"
        assert not any(worker.draining for worker in self.machine.workers()), "and takes work"
        assert not self.oracle.outstanding, "every caller is answered, or undone"

    def _is_at_rest(self) -> bool:
        processes = self.launcher.running.values()
        busy = not all(p.answers and p.worker.idle for p in processes)
        if not all(task.done() for task in self._loads) or self.loader._is_busy:
            return False
        everyone = len(processes) == len(self.versions.slots)
        return everyone and not (busy or len(self.journal) or self.machine.operations_in_flight)

    @property
    def _workers(self) -> Any:
        return [processes.worker for processes in self.launcher.running.values()]

    def _on_failure(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._failures.append(error if error is not None else AssertionError(context["message"]))

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failures.append(innermost(error))

    def _raise_failures(self) -> None:
        if self._failures:
            raise self._failures[0]


class SimulatedVersions(ModelVersions):
    """Stores weights on a disk that takes its time or fails."""

    launcher: FakeLauncher
    rng: random.Random

    async def persist(self, version: ModelVersion, fingerprint: str) -> None:
        self.launcher.next_weights = version.number
        await asyncio.sleep(self.rng.choice((0.0, 0.05)))
        if self.rng.random() < 0.2:
            raise StorageUnavailable("no space")
        await super().persist(version, fingerprint)


class SimulatedLoader(WeightsLoader):
    """Loads weights, for which there is enough memory."""

    def __init__(self, simulation: ShellSimulation, config: Config) -> None:
        super().__init__(
            simulation.supervisor,
            simulation.dispatcher,
            simulation.restarts,
            lambda _: None,
            config,
        )

    async def _find(self, source: str) -> str:
        """It is there."""
        return source

    def _require_memory(self, model: str) -> None:
        """There is enough."""
