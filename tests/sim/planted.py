"""How bugs are planted: at the inputs and outputs of the state machine, on the disk, or on a public function.

None of it knows what is inside the gateway, so that a bug is still there when that is written anew.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from service.errors import QuireError
from tests.sim.machine import PlantedMachine
from tests.sim.model_worker import ProtocolError
from tests.sim.schedules import Kind, ScheduleFailed, run_schedules
from tests.sim.simulation import Simulation

Planter: TypeAlias = Callable[[pytest.MonkeyPatch], None]
# A state machine with a bug, or what patches something else.
Plant: TypeAlias = type[PlantedMachine] | Planter
# What the oracle, model workers and the gateway say of one: not a TypeError, say.
BROKEN_PROMISES = (AssertionError, ProtocolError, ValueError, QuireError)


def plant(bug: Plant, patch: pytest.MonkeyPatch) -> None:
    """From now on schedules have the bug, until `patch` is undone."""
    if isinstance(bug, type) and issubclass(bug, PlantedMachine):
        patch.setattr("tests.sim.simulation.Machine", bug)
        for check in bug.silent:
            patch.setattr(check, lambda *_: None)
    else:
        bug(patch)  # type: ignore[call-arg]


def begins_at(seed: int) -> Callable[[Planter], Planter]:
    """Which schedule is the first to be run with a bug: that saves seconds, and decides nothing."""

    def mark(bug: Planter) -> Planter:
        bug.first_seed = seed  # type: ignore[attr-defined]
        return bug

    return mark


def is_found(bug: Plant, patch: pytest.MonkeyPatch, schedules: int, kind: Kind = Simulation) -> None:
    """Asserts that one of so many schedules finds the bug, and by a broken promise."""
    plant(bug, patch)
    first = getattr(bug, "first_seed", 0)
    with pytest.raises(ScheduleFailed) as failed:
        run_schedules(itertools.chain(range(first, schedules), range(first)), kind)
    assert isinstance(failed.value.__cause__, BROKEN_PROMISES), failed.value


def plants_of(module: ModuleType) -> list[Plant]:
    """The bugs of a module: its own classes and functions with public names."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return [value for value in own.values() if getattr(value, "__module__", "") == module.__name__]


def everywhere(patch: pytest.MonkeyPatch, function: Callable[..., Any], instead: Callable[..., Any]) -> None:
    """Puts another function in a module-level one's place, under whatever names the gateway has it."""
    places = [
        (module, name)
        for module in list(sys.modules.values())
        if module.__name__.startswith("service.")
        for name, value in vars(module).items()
        if value is function
    ]
    assert places, "nobody has it"
    for module, name in places:
        patch.setattr(module, name, instead)
