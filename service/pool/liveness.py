"""Health check of a worker, from its messages and the time during which the gateway was running.

Pure: no clock, no I/O. Time is that of a RunningClock: a pause of the whole machine or cgroup, which stops
gateway and worker together, does not count against the worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.config import Config
from service.pool.launcher import PoolFailed
from service.running_clock import RunningClock
from workers.common import worker_pb2

_MAX_TICK_S = 0.125
# Snapshots report the running step. Busy workers are polled this often, too: step timeouts are in seconds.
_SNAPSHOT_INTERVAL_S = 1.0
# How much slower than the best observed speed a step may be: contexts vary in length, CPUs are shared.
_SLOWDOWN_LIMIT = 20


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Why an incarnation has ended, or has to be killed."""

    why: str
    # It will not exit by itself.
    hung: bool = False
    # It was not heard of: it may only have been paused or cut off. Then it goes on, and can be leased again.
    silent: bool = False
    # It exited by itself, as far as is known, and not on request.
    crashed: bool = False
    # Set if no other incarnation can serve either.
    failure: PoolFailed | None = None


def step_timeout_s(min_timeout_s: float, expected_s: float) -> float:
    """Timeout of a step that takes `expected_s` at the best observed speed of its worker (0: unknown)."""
    return max(min_timeout_s, _SLOWDOWN_LIMIT * expected_s)


class Liveness:
    """Health state of one incarnation. The owner calls `tick` every `tick_s`."""

    def __init__(self, config: Config, *, adopted: bool = False) -> None:
        """An adopted worker is running already: its first message is subject to the heartbeat timeout."""
        self._config = config
        self._awaits_first_message = adopted
        # Several ticks in the shortest of the timeouts.
        self.tick_s = min(_MAX_TICK_S, config.suspect_after_s / 4, config.heartbeat_timeout_s / 4)
        self._clock = RunningClock(self.tick_s)
        self._last_message_s = 0.0
        self._got_message_in_tick = False
        self._last_snapshot_s = -_SNAPSHOT_INTERVAL_S
        self._request_pending = False
        self._ready = False
        # When the adopt command was sent.
        self._adopt_sent_s: float | None = None
        self._snapshot = worker_pb2.WorkerSnapshot()
        self._step_seen_s = 0.0

    def tick(self, elapsed_s: float) -> None:
        self._clock.tick(elapsed_s)
        if self._got_message_in_tick:
            self.on_message()
            self._got_message_in_tick = False

    def on_message(self) -> None:
        """The worker sent a message. Silence counts in whole ticks, and this tick is not silent."""
        self._last_message_s = self._clock.now_s
        self._got_message_in_tick = True
        self._awaits_first_message = False

    def on_adopt_sent(self) -> None:
        """The gateway asked the worker which sequences it keeps."""
        self._adopt_sent_s = self._clock.now_s

    def on_ready(self) -> None:
        self._ready = True

    def on_snapshot(self, snapshot: worker_pb2.WorkerSnapshot) -> None:
        if snapshot.step_number != self._snapshot.step_number:
            self._step_seen_s = self._clock.now_s
        self._snapshot, self._last_snapshot_s = snapshot, self._clock.now_s
        self._request_pending = False

    @property
    def _silent_s(self) -> float:
        return self._clock.now_s - self._last_message_s

    def take_request(self) -> bool:
        """Whether to send a snapshot request now. If True, it counts as sent.

        A request is due if the worker is silent, or its last snapshot is too old. At most one is pending.
        """
        due = self._silent_s > 0 or self._clock.now_s - self._last_snapshot_s >= _SNAPSHOT_INTERVAL_S
        sends = due and not self._request_pending
        self._request_pending |= sends
        return sends

    @property
    def is_suspect(self) -> bool:
        """Whether it has been silent for longer than a healthy worker. It gets no new sequences."""
        return self._ready and self._silent_s > self._config.suspect_after_s

    def check(self) -> WorkerExit | None:
        """Returns why the worker has to be killed, or None if it is healthy."""
        config = self._config
        if not self._ready and self._adopt_sent_s is None:
            if self._awaits_first_message and self._clock.now_s > config.heartbeat_timeout_s:
                return WorkerExit("it does not answer its new gateway", hung=True)
            if self._clock.now_s > config.worker_start_timeout_s:
                return WorkerExit("it did not become ready in time", hung=True)
        elif self._silent_s > config.heartbeat_timeout_s:
            return WorkerExit("it stopped answering", hung=True, silent=True)
        elif self._step_s > step_timeout_s(config.step_timeout_s, self._snapshot.step_expected_ns / 1e9):
            return WorkerExit("a step took too long", hung=True)
        elif self._adopt_timed_out:
            return WorkerExit("it did not say in time which sequences it keeps", hung=True)
        return None

    @property
    def _adopt_timed_out(self) -> bool:
        """The timeout is that of a step: one of the earlier gateway may have to finish first."""
        if self._ready or self._adopt_sent_s is None:
            return False
        return self._clock.now_s - self._adopt_sent_s > self._config.step_timeout_s

    @property
    def _step_s(self) -> float:
        """Age of the running step: the lower of both clocks, since either process may have been paused."""
        return min(self._snapshot.step_age_ns / 1e9, self._clock.now_s - self._step_seen_s)
