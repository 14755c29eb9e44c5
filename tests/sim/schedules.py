"""Many schedules, each from its seed."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterable, Iterator

import structlog

from tests.sim.simulation import Simulation


class ScheduleFailed(Exception):
    """A schedule broke a promise. The message has its seed and how it ended."""


def run_schedule(seed: int, seen: Counter[str]) -> None:
    """Runs one schedule; counts what happened in `seen`. Raises ScheduleFailed."""
    simulation = Simulation(seed, seen)
    try:
        simulation.run()
    except Exception as error:
        trace = "\n".join(f"  {entry!r}".replace("\n", " ") for entry in simulation.trace)
        raise ScheduleFailed(f"seed {seed}: {error!r}; the last events:\n{trace}") from error


def run_schedules(seeds: Iterable[int]) -> Counter[str]:
    """Runs schedules and says what happened in them. Raises ScheduleFailed for the first that fails."""
    seen: Counter[str] = Counter()
    with quietly():
        for seed in seeds:
            run_schedule(seed, seen)
    return seen


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without a log: refusals and failures are what is tried, and there are thousands of them."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**before)
