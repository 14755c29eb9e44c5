"""Whether a worker still lives, judged by what it says and by how long the gateway was there to hear it.

Pure: no clock, no I/O. Time is that of a RunningClock: a worker that was stopped together with the gateway (a
paused machine, a frozen cgroup) has done nothing wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.v1 import worker_pb2

from service.config import Config
from service.running_clock import RunningClock

_LONGEST_BEAT_S = 0.125
# Snapshots tell of steps: often enough for bounds of seconds, also from a worker that talks all the time.
_SNAPSHOT_INTERVAL_S = 1.0
# How much slower than the best pace seen a step may be: contexts are longer, processors are shared.
_PACE_SLACK = 20


@dataclass(frozen=True, slots=True)
class End:
    """Why an incarnation is at its end. One that hangs will not end by itself."""

    why: str
    hangs: bool = False
    # By itself, as far as is known, and not because somebody wanted it.
    crashed: bool = False


def step_bound_s(step_timeout_s: float, expected_s: float) -> float:
    """How long a step may take that would take `expected_s` at its worker's best pace (0: not known)."""
    return max(step_timeout_s, _PACE_SLACK * expected_s)


class Liveness:
    """What one incarnation has shown of itself."""

    def __init__(self, config: Config, *, adopted: bool = False) -> None:
        """One that was adopted is not starting: its first word is waited for as for any other."""
        self._config = config
        self._must_speak = adopted
        # Several in the shortest time that means anything.
        self.beat_s = min(_LONGEST_BEAT_S, config.suspect_after_s / 4, config.heartbeat_timeout_s / 4)
        self._clock = RunningClock(self.beat_s)
        self._heard_s = 0.0
        self._spoke = False
        self._told_s = -_SNAPSHOT_INTERVAL_S
        self._asked = False
        self._ready = False
        # Since when it has been asked what it keeps.
        self._sorting_s: float | None = None
        self._snapshot = worker_pb2.WorkerSnapshot()
        self._step_seen_s = 0.0

    def beat(self, elapsed_s: float) -> None:
        """Time has passed since the last beat."""
        self._clock.beat(elapsed_s)
        if self._spoke:
            self.heard()
            self._spoke = False

    def heard(self) -> None:
        """Something came from it. Silence is counted in whole beats: in this one it was not silent."""
        self._heard_s = self._clock.now_s
        self._spoke = True
        self._must_speak = False

    def sorts_out(self) -> None:
        """It could serve, and is asked which sequences it keeps."""
        self._sorting_s = self._clock.now_s

    def became_ready(self) -> None:
        """It has come through its first forward."""
        self._ready = True

    def told(self, snapshot: worker_pb2.WorkerSnapshot) -> None:
        """It said how it is."""
        if snapshot.step_number != self._snapshot.step_number:
            self._step_seen_s = self._clock.now_s
        self._snapshot, self._told_s = snapshot, self._clock.now_s
        self._asked = False

    @property
    def _silent_s(self) -> float:
        return self._clock.now_s - self._heard_s

    def asks(self) -> bool:
        """Whether to ask it for a snapshot, which is then taken as asked for.

        It is if the worker says nothing of its own, or has not told of its steps for a while.
        """
        due = self._silent_s > 0 or self._clock.now_s - self._told_s >= _SNAPSHOT_INTERVAL_S
        asks = due and not self._asked
        self._asked |= asks
        return asks

    @property
    def is_suspect(self) -> bool:
        """Whether it has been silent for longer than one that is well ever is: nothing new goes there."""
        return self._ready and self._silent_s > self._config.suspect_after_s

    def end(self) -> End | None:
        """Why it is at its end, if it is."""
        config = self._config
        if not self._ready and self._sorting_s is None:
            if self._must_speak and self._clock.now_s > config.heartbeat_timeout_s:
                return End("it does not answer its new gateway", hangs=True)
            if self._clock.now_s > config.worker_start_timeout_s:
                return End("it did not become ready in time", hangs=True)
        elif self._silent_s > config.heartbeat_timeout_s:
            return End("it stopped answering", hangs=True)
        elif self._step_s > step_bound_s(config.step_timeout_s, self._snapshot.step_expected_ns / 1e9):
            return End("a step took too long", hangs=True)
        elif self._is_sorting_for_long:
            return End("it did not say in time what it keeps", hangs=True)
        return None

    @property
    def _is_sorting_for_long(self) -> bool:
        """A step of its former gateway's may have to end first."""
        if self._ready or self._sorting_s is None:
            return False
        return self._clock.now_s - self._sorting_s > self._config.step_timeout_s

    @property
    def _step_s(self) -> float:
        """How long the running step has taken, by the clocks of both: either may have been stopped."""
        return min(self._snapshot.step_age_ns / 1e9, self._clock.now_s - self._step_seen_s)
