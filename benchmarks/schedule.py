"""Runs a workload: all competitors take turns, for as many rounds as the time allows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peers.base import Sample, Unavailable
from benchmarks.plan import Entry, Workload
from benchmarks.results import Figure, WorkloadResult, figure, ratio

GetPeer = Callable[[str], PeerProcess]
# Called with progress messages.
Report = Callable[[str], None]


@dataclass(slots=True)
class _Contestant:
    """An entry while its workload runs."""

    entry: Entry
    rounds: list[Sample] = field(default_factory=list)
    first_tokens: list[int] | None = None
    problem: str = ""
    failed: bool = False
    # How long its last turn took, or is expected to take; 0: not known.
    turn_s: float = 0.0
    stopped: bool = False

    def attempt(self, work: Callable[[], Any]) -> Any:
        """The result, or None after a failure, which is noted and excludes the contestant."""
        try:
            return work()
        except Unavailable as reason:
            self.problem = str(reason)
        except PeerFailed as error:
            self.problem, self.failed = str(error), True
        return None


_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
# A competitor with longer turns is stopped when the next one does not fit into the workload's time.
_LONG_TURN_S = 10.0
# A peer's first call makes the files of its model, which for billions of weights takes minutes.
_PREPARE_TIMEOUT_S = 1800.0


class WorkloadRun:
    """One workload with its contestants. A failure of one is noted, and the others continue."""

    def __init__(self, workload: Workload, get_peer: GetPeer, report: Report) -> None:
        self._workload = workload
        self._get_peer = get_peer
        self._report = report
        self._contestants = [_Contestant(entry) for entry in workload.entries]

    def run(self, seconds: float) -> None:
        """Prepares all contestants, then runs rounds until about `seconds` after the call.

        Contestants with long turns are stopped when no time is left for them. The others have the minimum
        number of rounds, however long that takes.
        """
        end_s = time.monotonic() + seconds
        self._prepare()
        for contestant in self._racing():
            self._turn(contestant, self._workload.warm, seed=1)
            contestant.turn_s *= self._workload.turn_over_warm
            contestant.rounds.clear()
        for index in range(_MOST_ROUNDS):
            began_s = time.monotonic()
            self._stop_slow(end_s - began_s)
            racing = self._racing()
            round_s = sum(contestant.turn_s for contestant in racing)
            if not racing or (index >= _LEAST_ROUNDS and began_s + round_s > end_s):
                break
            # Alternate the order, so that none always runs first. All have the same prompts in a round.
            for contestant in racing[:: 1 if index % 2 == 0 else -1]:
                self._turn(contestant, {}, seed=index + 2)
            self._report(f"round {index + 1} took {time.monotonic() - began_s:.1f} s")
        for name in {contestant.entry.peer for contestant in self._contestants}:
            with contextlib.suppress(PeerFailed, Unavailable):
                self._get_peer(name).call("release")

    def result(self, roof: Mapping[str, float]) -> WorkloadResult:
        """The figures of all contestants, and the comparisons."""
        workload = self._workload
        found: WorkloadResult = {name: getattr(workload, name) for name in ("name", "title", "unit")}
        found |= {"figures": [], "ratios": []}
        rounds: dict[str, list[Sample]] = {}
        for contestant in self._contestants:
            # A contestant that failed has not run in the same rounds as the others.
            samples = [] if contestant.problem else contestant.rounds
            rounds[contestant.entry.label] = samples
            found["figures"].append(self._figure(contestant, samples, roof))
        found["ratios"] = [ratio(comparison, rounds) for comparison in workload.comparisons]
        return found

    @property
    def failures(self) -> list[str]:
        """The failures, except missing installations."""
        name = self._workload.name
        return [f"{name}: {c.entry.label}: {c.problem}" for c in self._contestants if c.failed]

    @staticmethod
    def _figure(contestant: _Contestant, samples: list[Sample], roof: Mapping[str, float]) -> Figure:
        entry = contestant.entry
        if not samples:
            problem = contestant.problem or "not measured"
            return {"label": entry.label, "peer": entry.peer, "failed": contestant.failed, "problem": problem}
        found = figure(entry, samples, roof)
        if contestant.first_tokens:
            found["first_tokens"] = contestant.first_tokens
        return found

    def _prepare(self) -> None:
        """Starts the peers and prefills their sequences, once for all entries of a peer."""
        method, arguments = self._workload.prepare or ("versions", {})  # A peer loads with its first call.
        prepared: dict[str, _Contestant] = {}
        for contestant in self._contestants:
            name = contestant.entry.peer
            if name not in prepared:
                self._report(f"preparing {name}")
                found = contestant.attempt(partial(self._call_to_prepare, name, method, arguments))
                contestant.first_tokens = found if isinstance(found, list) else None
                prepared[name] = contestant
            first = prepared[name]
            contestant.problem, contestant.failed = first.problem, first.failed
            contestant.first_tokens = first.first_tokens

    def _call_to_prepare(self, name: str, method: str, arguments: dict[str, Any]) -> Any:
        return self._get_peer(name).call(method, timeout_s=_PREPARE_TIMEOUT_S, **arguments)

    def _turn(self, contestant: _Contestant, arguments: dict[str, Any], seed: int) -> None:
        entry = contestant.entry
        arguments = entry.arguments | arguments
        if entry.method == "prefill":
            # New random prompts in each round, the same for all peers.
            arguments |= {"seed": seed}
        began_s = time.monotonic()
        sample = contestant.attempt(lambda: self._get_peer(entry.peer).call(entry.method, **arguments))
        contestant.turn_s = time.monotonic() - began_s
        if sample is not None:
            contestant.rounds.append(sample)

    def _stop_slow(self, left_s: float) -> None:
        """Stops contestants whose long turn does not fit into the time that faster ones leave."""
        for contestant in sorted(self._racing(), key=lambda contestant: contestant.turn_s):
            left_s -= contestant.turn_s
            if contestant.turn_s > _LONG_TURN_S and left_s < 0:
                left_s += contestant.turn_s
                contestant.stopped = True
                if not contestant.rounds:
                    contestant.problem = f"skipped: a turn takes about {contestant.turn_s:.0f} s"
                self._report(f"no time for {contestant.entry.label}: about {contestant.turn_s:.0f} s a turn")

    def _racing(self) -> list[_Contestant]:
        return [one for one in self._contestants if not (one.problem or one.stopped)]
