"""Many schedules, each from its seed."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import structlog

from tests.sim.shards import ShardSimulation
from tests.sim.shell import ShellSimulation
from tests.sim.simulation import Simulation

Kind: TypeAlias = type[Simulation] | type[ShellSimulation] | type[ShardSimulation]


class ScheduleFailed(Exception):
    """A schedule broke a promise. The message has its seed and how it ended."""


def run_schedule(seed: int, seen: Counter[str], kind: Kind = Simulation) -> None:
    """Runs one schedule; counts what happened in `seen`. Raises ScheduleFailed."""
    simulation = kind(seed, seen)
    try:
        simulation.run()
    except Exception as error:
        trace = "\n".join(f"  {entry!r}".replace("\n", " ") for entry in simulation.trace)
        raise ScheduleFailed(f"seed {seed}: {error!r}; the last events:\n{trace}") from error


def run_schedules(seeds: Iterable[int], kind: Kind = Simulation) -> Counter[str]:
    """Runs schedules and says what happened in them. Raises ScheduleFailed for the first that fails."""
    seen: Counter[str] = Counter()
    with quietly():
        for seed in seeds:
            run_schedule(seed, seen, kind)
    return seen


def without_addresses(entry: object) -> str:
    """An entry of a trace, without where in memory its objects are."""
    return re.sub(" at 0x[0-9a-f]+", "", repr(entry))


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without a log: refusals and failures are what is tried, and there are thousands of them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
