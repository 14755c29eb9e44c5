"""Planted bugs: in moves of caches between workers. Each public name is one."""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.effects import ExportKv, ReleaseSequences
from tests.forwards import Told
from tests.sim.machine import PlantedMachine


class SourceReleasedAtOnce(PlantedMachine):
    """What is copied is released before the target has confirmed it."""

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        yield command
        if isinstance(command, ExportKv):
            yield ReleaseSequences(self.parts.context.number(), (command.number,))
