"""Workers of other hosts for the real supervisor: links break, and the workers go on with what they have.

While a link is cut nothing arrives, here or there; what was sent arrives when it is healed, perhaps after the
worker has a later lease. A worker whose lease has ended keeps its sequences, and computes what it was told
before, until it gets the next one.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping

from tests.sim.fake_pool import FakeLauncher, FakeLink, Processes
from tests.sim.model_worker import ModelWorker, Pool, ProtocolError

# How long a message of an earlier lease may be under way after the link is healed.
_LATE_S = 3.0
_RETRY_S = 0.1


class LeasedProcesses(Processes):
    """One lease. The worker may have had earlier ones."""

    def __init__(self, address: str, worker: ModelWorker, epoch: int, pool: LeasingLauncher) -> None:
        super().__init__(address, worker, pool)
        self.epoch = epoch
        self._leases = pool
        # The worker has had no lease before.
        self._is_first = worker.epoch == epoch

    @property
    def is_cut(self) -> bool:
        return self.worker.worker_id in self._leases.cut

    @property
    def has_ended(self) -> bool:
        return self.worker.crashed

    @property
    def is_current(self) -> bool:
        """Whether the worker listens to this lease."""
        return self.worker.epoch == self.epoch and not self.worker.crashed

    def exit(self, status: int) -> None:
        """Only the end of the stream tells of it."""
        self.worker.crashed = True
        if self.link is not None:
            self.link.break_off()

    async def wait(self) -> int:
        await asyncio.Event().wait()
        return 0

    def kill(self) -> None:
        """Does nothing: no signal reaches it."""

    def given_back(self) -> None:
        # One that hangs, or is cut off, does not hear of it, and keeps what it has.
        if not (self.hangs or self.is_cut):
            self.worker.crashed = True

    async def stop(self, *, grace_s: float) -> int:
        # One that is not ready could not be reached for as long as it may take to become so.
        silent = self.hung or self.is_cut or self._leases.is_just_healed or not self.is_ready
        assert grace_s or silent, "one that is well was judged dead"
        self._leases.ended(self)
        return 0

    def holdings(self) -> Mapping[int, int]:
        if self._is_first:
            return {}
        if self.epoch <= self.worker.epoch:
            raise ProtocolError("a lease that is not later than the one before")
        self.worker.epoch = self.epoch
        return self.worker.holdings()

    def become_ready(self) -> None:
        if self.link is None or self.link.closed.is_set():
            return
        if self.is_cut:
            asyncio.get_running_loop().call_later(_RETRY_S, self.become_ready)
        else:
            super().become_ready()


class LeasingLauncher(FakeLauncher):
    """Leases workers, which are there already or come again after they have ended."""

    def __init__(self, rng: random.Random, pages: Pool, capacity_tokens: int, seen: Counter[str]) -> None:
        super().__init__(rng, pages, capacity_tokens, seen)
        # By id: those whose links are cut; and those without a lease, which go on.
        self.cut: set[str] = set()
        self._without_lease: dict[str, ModelWorker] = {}
        self._healed_s = -1.0
        self._links: list[tuple[LeasedProcesses, FakeLink]] = []

    def make(self, worker_id: str, epoch: int) -> Processes:
        worker = self._without_lease.pop(worker_id, None)
        if worker is None:
            worker = ModelWorker(worker_id, epoch, self.pages, self.rng, self._seen)
        else:
            self._seen["leased again"] += 1
        return LeasedProcesses(f"sim:{worker_id}-{epoch}", worker, epoch, self)

    def unheard(self) -> list[ModelWorker]:
        return list(self._without_lease.values())

    @property
    def is_just_healed(self) -> bool:
        """A worker may have been judged just before."""
        return self._healed_s == asyncio.get_running_loop().time()

    def ended(self, processes: LeasedProcesses) -> None:
        """Notes that a lease has ended."""
        self.has_ended(processes)
        worker = processes.worker
        if not worker.crashed:
            self._without_lease[worker.worker_id] = worker
        if processes.link is not None:
            self._links.append((processes, processes.link))

    def cut_one(self) -> None:
        """The link to one is cut."""
        connected = [worker_id for worker_id in self.running if worker_id not in self.cut]
        if connected:
            self._seen["link cut"] += 1
            self.cut.add(self.rng.choice(connected))

    def heal(self) -> None:
        """All links carry again, and what was sent arrives; of earlier leases now or later."""
        self.cut.clear()
        self._healed_s = asyncio.get_running_loop().time()
        for processes in self.running.values():
            if processes.link is not None:
                _arrive(processes, processes.link)
                processes.link.answer()
        links, self._links = self._links, []
        for processes, link in links:
            late_s = self.rng.choice((0.0, self.rng.uniform(0.0, _LATE_S)))
            asyncio.get_running_loop().call_later(late_s, self._arrive_late, processes, link)

    def _arrive_late(self, processes: LeasedProcesses, link: FakeLink) -> None:
        if accepts(processes):
            _arrive(processes, link)
        elif link.under_way:
            self._seen["message of an earlier lease"] += 1


def accepts(processes: LeasedProcesses) -> bool:
    """Whether the worker still reads the stream of this lease."""
    return processes.is_current


def _arrive(processes: Processes, link: FakeLink) -> None:
    commands, link.under_way = link.under_way, []
    for command in commands:
        link.arrive(command)
