"""Planted bugs: in moves of caches between workers. Each public name is one."""

from __future__ import annotations

from collections.abc import Iterable

from service.caches.effects import ExportKv, ImportKv, ReleaseSequences
from tests.forwards import Told
from tests.sim.machine import PlantedMachine


class SourceReleasedAtOnce(PlantedMachine):
    """What is copied is released before the target has confirmed it."""

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        yield command
        if isinstance(command, ExportKv):
            yield ReleaseSequences(self.parts.context.number(), (command.number,))


class ImportsNotWaitedFor(PlantedMachine):
    """What is on its way to the target counts as imported, and is lost there."""

    def on_command(self, worker_id: str, epoch: int, command: Told) -> Iterable[Told]:
        if not isinstance(command, ImportKv):
            return (command,)
        self.answered([(command.op_id, None)], self.oracle.now_s)
        return ()
