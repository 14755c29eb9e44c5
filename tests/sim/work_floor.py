"""What the workers behind the supervisor do when the schedule lets them, and what befalls them."""

from __future__ import annotations

import random
from collections import Counter

from tests.sim.fake_pool import FakeLauncher, Processes
from tests.sim.watched import WatchedDispatcher


class WorkFloor:
    """Acts on any of the workers that run just now."""

    def __init__(
        self, launcher: FakeLauncher, dispatcher: WatchedDispatcher, rng: random.Random, seen: Counter[str]
    ) -> None:
        self._launcher = launcher
        self._dispatcher = dispatcher
        self._rng = rng
        self._seen = seen

    def take(self) -> None:
        """One takes commands off its stream."""
        processes = self._any()
        if processes is not None:
            processes.worker.take(self._rng.randint(1, 6))

    def step(self) -> None:
        """One runs a step."""
        processes = self._any()
        if processes is not None:
            processes.worker.step()

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

    def _answer(self, processes: Processes, count: int) -> None:
        if processes.link is None or processes.link.closed.is_set():
            # What is said to nobody, nobody has heard.
            return
        processes.link.deliver(self._dispatcher.take_answers(processes.worker, count))
