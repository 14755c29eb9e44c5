"""Makes faults: signals to workers and gateway at random moments, and ends at marked points."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
from quire.v1 import executor_pb2 as pb
from quire.v1.executor_pb2_grpc import ModelExecutorServiceStub

from tests.damaged_pages import FAULTS, SPOILT, THEIRS, files_in
from tests.soak.server import Server
from tests.soak.tally import Tally

# How likely each point is to be the end of a process that comes by. Some are passed more often than others.
WORKER_RATES = {
    "worker: taken": 0.0003,
    "worker: begun": 0.0008,
    "worker: computed, not told": 0.0008,
    "worker: told": 0.0008,
    "worker: queued to be sent": 0.0008,
}
GATEWAY_RATES = {
    "gateway: asked": 0.0001,
    "gateway: computed, not written": 0.00015,
    "gateway: given to the journal": 0.00015,
    "gateway: written, not answered": 0.00015,
    "gateway: answered": 0.0001,
}
_POLL_S = 0.02
# So many faults come before the last one has healed.
_UNHEALED_SHARE = 0.15
_LONGEST_WAIT_S = 20.0
# Of the files of KV, by each such fault.
_DAMAGED_SHARE = 0.2
_KEPT_SHARE = 0.1


class Injector:
    """Makes faults until as many have been as are wanted."""

    def __init__(self, server: Server, tally: Tally, seed: int, interval_s: float) -> None:
        self._server = server
        self._tally = tally
        self._rng = random.Random(seed)
        self._interval_s = interval_s
        self._keeps_rates = True
        # Those that are made once before any is made at random.
        self._first: list[Callable[[], Awaitable[None]]] = []
        self._kinds: list[tuple[float, Callable[[], Awaitable[None]]]] = [
            (0.50, self._kill_worker),
            (0.07, self._stop_worker),
            (0.07, self._pause_worker),
            (0.22, self._kill_gateway),
            (0.08, self._kill_all),
            (0.06, self._pause_gateway),
        ]

    async def run(self, stop: asyncio.Event) -> None:
        """Until told to stop."""
        await self._begin()
        while not stop.is_set():
            await self._some_work()
            await self._next_kind()()
        # What ends from now on ends at a mark it has; its successors have none.
        self._keeps_rates = False

    async def _begin(self) -> None:
        # The first ones have no marks: none was to end while the undisturbed texts were made.
        await self._kill_all()

    def _next_kind(self) -> Callable[[], Awaitable[None]]:
        if self._first:
            return self._first.pop()
        shares, kinds = zip(*self._kinds, strict=True)
        found: Callable[[], Awaitable[None]] = self._rng.choices(kinds, shares)[0]
        return found

    async def _some_work(self) -> None:
        """Until callers have come on for a while; now and then a fault hits a server that has not healed."""
        before, began_s = self._tally.tokens, time.monotonic()
        await asyncio.sleep(self._rng.uniform(0.2, 1.8) * self._interval_s)
        if self._rng.random() > _UNHEALED_SHARE:
            wanted = before + self._rng.randint(1, 40)
            while self._tally.tokens < wanted and time.monotonic() - began_s < _LONGEST_WAIT_S:
                await asyncio.sleep(_POLL_S)

    async def watch(self) -> None:
        """Starts the gateway again when it has ended, and notes ends at marked points, until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            for at_s, where, phase in self._server.new_marks():
                self._tally.fault(f"{where} exit", phase, at_s)
            if self._server.has_ended:
                rates: dict[str, float] = {}
                # Some lives are without marks, so that signals have their turn as well.
                if self._keeps_rates and self._rng.random() < 0.8:
                    rates = {**WORKER_RATES, **GATEWAY_RATES}
                self._server.start(rates)

    def _note(self, kind: str) -> None:
        self._tally.fault(kind, "anywhere", time.time())

    async def _kill_worker(self) -> None:
        pids = self._server.worker_pids()
        if pids:
            self._note("worker SIGKILL")
            self._server.kill(self._rng.choice(pids), signal.SIGKILL)

    async def _stop_worker(self) -> None:
        """It hangs, and is found out by its silence."""
        pids = self._server.worker_pids()
        if pids:
            self._note("worker SIGSTOP")
            self._server.kill(self._rng.choice(pids), signal.SIGSTOP)

    async def _pause_worker(self) -> None:
        """It hangs, and goes on, perhaps after it was given up."""
        pids = self._server.worker_pids()
        if pids:
            pid = self._rng.choice(pids)
            self._note("worker paused")
            self._server.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.05, 2.5))
            self._server.kill(pid, signal.SIGCONT)

    async def _kill_gateway(self) -> None:
        if not self._server.has_ended:
            self._server.worker_pids()
            self._note("gateway SIGKILL")
            self._server.kill(self._server.pid, signal.SIGKILL)

    async def _kill_all(self) -> None:
        """Gateway and workers together, as when a machine's service is killed."""
        if not self._server.has_ended:
            pids = self._server.worker_pids()
            self._note("all SIGKILL")
            self._server.kill(self._server.pid, signal.SIGKILL)
            for pid in pids:
                self._server.kill(pid, signal.SIGKILL)

    async def _pause_gateway(self) -> None:
        if not self._server.has_ended:
            pid = self._server.pid
            self._note("gateway paused")
            self._server.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.05, 1.5))
            self._server.kill(pid, signal.SIGCONT)


class DiskInjector(Injector):
    """Also spoils what is in the directory of KV on disk, `kv` of the server's directory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        more = [(0.5, self._damage_files), (0.15, self._spoil_directory), (0.1, self._fill_disk)]
        self._kinds += [*more, (0.1, self._take_permissions)]
        self._first = [self._damage_files, self._fill_disk, self._spoil_directory, self._damage_files]
        self._root = self._server.directory / "kv" / "quire-kv"
        self._outside = self._server.directory / "outside"
        (self._outside / THEIRS).parent.mkdir(parents=True)
        (self._outside / THEIRS).write_bytes(b"of someone else")
        # Files as they were once, by their names: they come back when their caches have gone on.
        self._stale: dict[Path, bytes] = {}

    async def _some_work(self) -> None:
        await super()._some_work()
        async with self._server.connect(()) as channel:
            with contextlib.suppress(grpc.RpcError):
                status = await ModelExecutorServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=1)
                for worker in status.workers:
                    self._tally.note_disk((worker.worker_id, worker.pid), worker.kv_disk)

    async def _damage_files(self) -> None:
        self._note("files of KV damaged")
        for path in files_in(self._root):
            # It may be deleted, or found to be damaged, at any time.
            with contextlib.suppress(OSError, ValueError, IndexError):
                if self._rng.random() < _KEPT_SHARE:
                    self._stale[path] = path.read_bytes()
                if self._rng.random() < _DAMAGED_SHARE:
                    self._rng.choice(FAULTS)(path, self._rng)
        for path in self._rng.sample(sorted(self._stale), len(self._stale) // 2):
            content = self._stale.pop(path)
            with contextlib.suppress(OSError):
                # Not what is there now: it may be a pipe, or a link.
                if not path.parent.is_symlink():
                    path.unlink(missing_ok=True)
                    path.write_bytes(content)

    async def _spoil_directory(self) -> None:
        spoil = self._rng.choice(SPOILT)
        self._note(f"directory of KV: {spoil.__name__}")
        with contextlib.suppress(OSError, IndexError):
            spoil(self._root, self._outside)
        await asyncio.sleep(self._rng.uniform(0.05, 1.5))
        if not (self._root / "lock").is_file():
            # Otherwise nothing more is stored from now on.
            shutil.rmtree(self._root, ignore_errors=True)
        left = [path for path in self._outside.rglob("*") if path.is_file()]
        if left != [self._outside / THEIRS]:
            self._tally.lose("unexpected errors", f"{spoil.__name__}: outside of the directory are {left}")

    async def _fill_disk(self) -> None:
        """Workers cannot write a whole file."""
        self._note("disk full")
        pids = self._server.worker_pids()
        for size in (self._rng.randrange(1 << 10), psutil.RLIM_INFINITY):
            for pid in pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
            await asyncio.sleep(self._rng.uniform(0.05, 1.5))

    async def _take_permissions(self) -> None:
        """Of the directory, or to others: then no worker that starts uses it. For root only the latter."""
        self._note("permissions of KV changed")
        with contextlib.suppress(OSError):
            self._root.chmod(self._rng.choice([0, 0o500, 0o755]))
            await asyncio.sleep(self._rng.uniform(0.05, 1.5))
            self._root.chmod(0o700)


class RanksInjector(Injector):
    """Also hits the other ranks of workers that are groups of processes."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kinds += [(0.4, self._kill_rank), (0.15, self._stop_rank)]

    async def _kill_rank(self) -> None:
        """Not the first, which is the worker's process for the gateway."""
        if pids := self._ranks():
            self._note("other rank SIGKILL")
            self._server.kill(self._rng.choice(pids), signal.SIGKILL)

    async def _stop_rank(self) -> None:
        """The first one then waits in a sum, and is found out by its step's time."""
        if pids := self._ranks():
            self._note("other rank SIGSTOP")
            self._server.kill(self._rng.choice(pids), signal.SIGSTOP)

    def _ranks(self) -> list[int]:
        self._server.worker_pids()
        return self._server.rank_pids()
