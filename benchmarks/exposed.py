"""How long a GPU waits for its host between two steps: `python -m benchmarks.exposed [--rows 1,64]`.

As in `benchmarks.host`, all but the model is real, and a replay launches nothing. But here a device takes a
fixed time for each step, one after the other, and callers send the next token a fixed time after their
answer, all in one message. With and without launching steps before the results of the last one are read (ADR
43). Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.host import OUTPUTS, Host, ReplayedRunner, numbers
from workers.decodes import CHOSEN, OP_ID, POSITION, TOKEN, Decodes, DecodesDone
from workers.operations import Result
from workers.runners.device_queue import DeviceQueue

_CONTEXT = 1024
_SETTLING_STEPS = 20
# A thread that sleeps wakes up late; one that waits for a GPU does not sleep.
_AWAKE_S = 0.0003


def _wait_until(when_s: float) -> None:
    time.sleep(max(0.0, when_s - time.perf_counter() - _AWAKE_S))
    while time.perf_counter() < when_s:
        pass


class TimedDevice(DeviceQueue):
    """Does one step after the other, each in `step_s`."""

    def __init__(self, step_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._step_s = step_s
        self.busy_until_s = 0.0
        # How long it had nothing to do before each step.
        self.idle_s: list[float] = []

    def replay(self) -> None:
        """Launch a step."""
        now_s = time.perf_counter()
        self.idle_s.append(max(0.0, now_s - self.busy_until_s))
        self.busy_until_s = max(now_s, self.busy_until_s) + self._step_s

    def event(self) -> TimedEvent:
        """See `DeviceQueue`."""
        return TimedEvent(self)


class TimedEvent:
    """When the step before it is done."""

    def __init__(self, device: TimedDevice) -> None:
        self._device, self._at_s = device, 0.0

    def record(self) -> None:
        """See `Event`."""
        self._at_s = self._device.busy_until_s

    def query(self) -> bool:
        """See `Event`."""
        return time.perf_counter() >= self._at_s

    def synchronize(self) -> None:
        """See `Event`."""
        _wait_until(self._at_s)


class Callers:
    """They append the chosen tokens. All requests of a step are one message."""

    def __init__(
        self, requests: Decodes, round_trip_s: float, submit: Callable[[Sequence[Decodes]], None]
    ) -> None:
        self._requests, self._round_trip_s, self._submit = requests, round_trip_s, submit
        self._answers: queue.SimpleQueue[tuple[float, DecodesDone] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Send the first requests."""
        self._thread.start()
        self._submit([self._requests])

    def stop(self) -> None:
        """Send nothing any more."""
        self._answers.put(None)
        self._thread.join()

    def answered(self, results: Sequence[Result | DecodesDone]) -> None:
        """Take the answers of a step."""
        for done in results:
            if isinstance(done, DecodesDone):
                self._answers.put((time.perf_counter(), done))

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            at_s, done = answer
            columns = self._requests.columns.copy()
            columns[POSITION] += 1
            columns[OP_ID] += len(done)
            columns[TOKEN] = done.columns[CHOSEN, np.argsort(done.columns[OP_ID])]
            self._requests = Decodes(columns, self._requests.outputs)
            time.sleep(max(0.0, at_s + self._round_trip_s - time.perf_counter()))
            self._submit([self._requests])


def measure(
    rows: int, output: str, *, device_ms: float, round_trip_ms: float, ahead: bool, steps: int
) -> dict[str, Any]:
    """One line: the median time for which the device waits before a step."""
    device = TimedDevice(device_ms / 1e3)
    runner = ReplayedRunner(rows, 2 * _CONTEXT, device, device.replay, can_launch=ahead)
    host = Host(rows, _CONTEXT, OUTPUTS[output], runs_ahead=True, runner=runner)
    callers = Callers(host.requests(), round_trip_ms / 1e3, host.loop.submit)

    def flush() -> None:
        host.loop.flush()
        callers.answered(host.results)
        host.results.clear()

    device.idle_s.clear()
    callers.start()
    while len(device.idle_s) < _SETTLING_STEPS + steps:
        host.loop.take()
        flush()
        host.loop.step()
        flush()
    callers.stop()
    idle_ms = [1e3 * idle_s for idle_s in device.idle_s[_SETTLING_STEPS:]]
    return {
        "rows": rows,
        "output": output,
        "device_ms": device_ms,
        "round_trip_ms": round_trip_ms,
        "ahead": ahead,
        "exposed_ms": round(statistics.median(idle_ms), 3),
        "exposed_mean_ms": round(statistics.mean(idle_ms), 3),
    }


def main() -> None:
    """Runs the command line and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256], metavar="N,...")
    parser.add_argument("--outputs", nargs="+", choices=("greedy", "drawn"), default=["greedy", "drawn"])
    parser.add_argument("--device-ms", type=float, default=8.0, help="an 8B model at 64 rows on an H200")
    parser.add_argument("--round-trip-ms", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=200, help="1000 at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    before = machine.times_s()
    times = {"device_ms": options.device_ms, "round_trip_ms": options.round_trip_ms, "steps": options.steps}
    lines = [
        measure(rows, output, ahead=ahead, **times)
        for rows in options.rows
        for output in options.outputs
        for ahead in (False, True)
    ]
    found = {"machine": machine.describe(), "lines": lines}
    print(json.dumps(found | {"disturbance": machine.disturbance(before, machine.times_s())}, indent=2))


if __name__ == "__main__":
    main()
