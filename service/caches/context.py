"""What all parts of the state machine share: the time, the effects so far, and numbers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from service.caches.effects import Command, Effects
from service.caches.entries import WorkerView


class Context:
    """The time of the current input, the effects so far, and the numbers of tickets, commands and caches."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.effects = Effects([], [], [])
        # For metrics. Those of a process share it.
        self.counts: Counter[str] = Counter()
        # What an adapter contains, by its number: see `Tenant.salt`.
        self.digest_of: Callable[[int], int | str] = lambda number: number
        # Returns a number that was never used before. Numbers only grow.
        self.number = itertools.count(1).__next__

    def skip_numbers(self, last: int) -> None:
        """Marks all numbers up to `last` as used."""
        self.number = itertools.count(max(self.number(), last + 1)).__next__

    def send(self, worker: WorkerView, command: Command) -> None:
        """Sends a command, unless this incarnation of the worker is lost."""
        if worker.is_ready:
            self.effects.commands.append((worker.worker_id, worker.epoch, command))
