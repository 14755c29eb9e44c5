"""Runs a workload: every competitor in turns, round after round, as often as the time allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peer_process import PeerFailed, PeerProcess
from benchmarks.peers.base import SETTLING_STEPS, Sample, Unavailable
from benchmarks.results import Figure, WorkloadResult, figure, ratio
from benchmarks.workloads import Entry, Workload

_MIN_ROUNDS = 3
_MAX_ROUNDS = 20
# An entry whose turn takes longer than this, and than that of others, takes part in these rounds only.
_LONG_TURN_S = 8.0
_LONG_TURN_FACTOR = 2.0
_LONG_TURN_ROUNDS = (0, 2)

GetPeer = Callable[[str], PeerProcess]
# Told of (what is going on, seconds that the workload still takes).
Report = Callable[[str, float], None]


@dataclass(slots=True)
class _Contestant:
    """An entry while its workload runs."""

    entry: Entry
    peer: PeerProcess | None = None
    turn_s: float = 0.0
    rounds: list[Sample | None] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    problem: str = ""
    failed: bool = False


class WorkloadRun:
    """One workload with its contestants. What goes wrong with one of them is noted, and the others go on."""

    def __init__(self, workload: Workload, get_peer: GetPeer, report: Report) -> None:
        self._workload = workload
        self._get_peer = get_peer
        self._report = report
        self._contestants = [_Contestant(entry) for entry in workload.entries]

    def run(self, seconds: float) -> None:
        """Prepares everyone, then takes turns until about `seconds` have passed since the call."""
        end_s = time.monotonic() + seconds
        self._prepare(end_s)
        for contestant in self._racing():
            self._report(f"warm-up: {contestant.entry.label}", max(0.0, end_s - time.monotonic()))
            self._warm_up(contestant)
        index = 0
        while index < _MIN_ROUNDS or (
            index < _MAX_ROUNDS and time.monotonic() + self._round_s(index) < end_s
        ):
            # To and fro, so that nobody always runs first.
            for contestant in self._racing()[:: 1 if index % 2 == 0 else -1]:
                self._report(f"round {index + 1}: {contestant.entry.label}", self._left_s(index, end_s))
                self._turn(contestant, index)
            index += 1
        for peer in self._peers().values():
            self._guarded(peer, "release")

    def result(self, roof: dict[str, float]) -> WorkloadResult:
        """The figures of everyone, and the comparisons."""
        workload = self._workload
        rounds = {c.entry.label: c.rounds for c in self._contestants if not c.problem}
        return WorkloadResult(
            name=workload.name,
            title=workload.title,
            unit=workload.unit,
            figures=[self._figure(contestant, roof) for contestant in self._contestants],
            ratios=[ratio(comparison, rounds) for comparison in workload.comparisons],
        )

    @property
    def failures(self) -> list[str]:
        """What went wrong that should not have."""
        name = self._workload.name
        return [f"{name}: {c.entry.label}: {c.problem}" for c in self._contestants if c.failed]

    def _figure(self, contestant: _Contestant, roof: dict[str, float]) -> Figure:
        entry = contestant.entry
        if contestant.problem or not any(contestant.rounds):
            problem = contestant.problem or "not measured"
            return Figure(label=entry.label, peer=entry.peer, failed=contestant.failed, problem=problem)
        found = figure(entry.label, entry.peer, self._workload, contestant.rounds, roof)
        if contestant.first_tokens:
            found["first_tokens"] = contestant.first_tokens
        return found

    def _prepare(self, end_s: float) -> None:
        """Starts the peers and fills their sequences, once for all entries that a peer has."""
        tokens: dict[str, Any] = {}
        problems: dict[str, tuple[str, bool]] = {}
        for contestant in self._contestants:
            name = contestant.entry.peer
            if name not in tokens and name not in problems:
                self._report(f"preparing: {contestant.entry.label}", max(0.0, end_s - time.monotonic()))
                try:
                    tokens[name] = self._prepare_peer(self._get_peer(name))
                except Unavailable as reason:
                    problems[name] = str(reason), False
                except PeerFailed as error:
                    problems[name] = str(error), True
            if name in problems:
                contestant.problem, contestant.failed = problems[name]
            else:
                contestant.peer, contestant.first_tokens = self._get_peer(name), tokens[name] or []

    def _prepare_peer(self, peer: PeerProcess) -> Any:
        if self._workload.prepare is None:
            peer.call("versions")  # It loads with its first call.
            return None
        method, arguments = self._workload.prepare
        return peer.call(method, **arguments)

    def _warm_up(self, contestant: _Contestant) -> None:
        """A small turn that does not count, and from it how long a whole one will take."""
        arguments = contestant.entry.arguments | self._workload.warm
        began_s = time.monotonic()
        self._measure(contestant, arguments, seed=1)
        took_s = time.monotonic() - began_s
        # One of the two grows from the warm-up to the turn.
        steps = [a.get("steps", 0) + SETTLING_STEPS for a in (contestant.entry.arguments, arguments)]
        batches = [a.get("batch", 1) for a in (contestant.entry.arguments, arguments)]
        contestant.turn_s = took_s * (steps[0] / steps[1]) * (batches[0] / batches[1])

    def _round_s(self, index: int) -> float:
        """What a round will take, from what the turns took last."""
        return sum(c.turn_s for c in self._racing() if not self._sits_out(c, index))

    def _sits_out(self, contestant: _Contestant, index: int) -> bool:
        shortest_s = min(other.turn_s for other in self._racing())
        takes_long = contestant.turn_s > max(_LONG_TURN_S, _LONG_TURN_FACTOR * shortest_s)
        return takes_long and index not in _LONG_TURN_ROUNDS

    def _left_s(self, index: int, end_s: float) -> float:
        """What the workload still takes from the beginning of a round, about."""
        left_s = max(0.0, end_s - time.monotonic())
        return min(max(left_s, self._round_s(index)), self._round_s(index) * (_MAX_ROUNDS - index))

    def _turn(self, contestant: _Contestant, index: int) -> None:
        if self._sits_out(contestant, index):
            contestant.rounds.append(None)
            return
        began_s = time.monotonic()
        # The same prompts for everyone in a round, and others in the next.
        sample = self._measure(contestant, contestant.entry.arguments, seed=index + 2)
        contestant.rounds.append(sample)
        contestant.turn_s = time.monotonic() - began_s

    def _measure(self, contestant: _Contestant, arguments: dict[str, Any], seed: int) -> Sample | None:
        entry = contestant.entry
        assert contestant.peer is not None
        if entry.method == "prefill":
            arguments = arguments | {"seed": seed}
        try:
            return contestant.peer.sample(entry.method, **arguments)
        except Unavailable as reason:
            contestant.problem = str(reason)
        except PeerFailed as error:
            contestant.problem, contestant.failed = str(error), True
        return None

    def _racing(self) -> Sequence[_Contestant]:
        return [contestant for contestant in self._contestants if not contestant.problem]

    def _peers(self) -> dict[str, PeerProcess]:
        return {c.entry.peer: c.peer for c in self._contestants if c.peer is not None}

    @staticmethod
    def _guarded(peer: PeerProcess, method: str) -> None:
        try:
            peer.call(method)
        except (PeerFailed, Unavailable):
            return
