"""A gateway's machine and one worker, in time that is only counted: how much is done in time, under any load.

The worker computes one forward after the other, its callers in turns, as fast as its capacity says; or, told
what a step costs anyway, all that it has in one step. Callers come at random, and go away at their deadlines.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from service.caches.admission import Limits
from service.caches.answers import CommandFailed, Event
from service.caches.effects import AbortForward, Effects
from service.caches.entries import Operation, WorkerView
from service.caches.machine import CacheMachine
from service.caches.requests import Append, Appended, AppendKind, Priority, Release, Result
from service.errors import DeadlinePassed, QuireError
from tests.forwards import SentForward, forward_of
from tests.sim.invariants import check_invariants
from workers.common import worker_pb2

TOKENS = 255
_PAGES = 1 << 20

# Of a loop that was refused.
_PAUSE_S = 0.2


@dataclass(slots=True)
class Group:
    """Callers who are alike. `per_s`: how many come each second. `loops`: one caller, so many at once."""

    per_s: float = 0.0
    loops: int = 0
    timeout_s: float | None = 1.0
    priority: Priority = Priority.NORMAL
    tokens: int = TOKENS
    # So many appends in each call, which are answered together or not.
    items: int = 1
    # What became of them, by reason; "late" are those who left before they were answered.
    answers: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def per_s_in_time(self, seconds: float) -> float:
        """How many a second were answered in time."""
        return self.answers["OK"] / seconds


@dataclass(slots=True, eq=False)
class _Call:
    group: Group
    began_s: float
    caller: int
    # Of its appends, that have not ended.
    missing: int


class Overloaded:
    """One run.

    `spread`: how unevenly long forwards of the same size take, from 0 to 1. `step_s`: what a step costs
    anyway; None: there are none, it computes one forward at a time.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        capacity_per_s: float,
        seed: int = 0,
        spread: float = 0.3,
        step_s: float | None = None,
        max_wait_s: float = 300.0,
        max_queued_operations: int = 100_000,
    ):
        self.groups = list(groups)
        limits = Limits(max_queued_operations, max_caches=1_000_000, max_wait_s=max_wait_s)
        self.machine = CacheMachine(limits)
        self.machine.worker_ready(WorkerView("worker-0", 1, 16, _PAGES, 10_000, _PAGES), 0.0)
        self._rng = random.Random(seed)
        self._token_s = 1 / capacity_per_s / (TOKENS + 1)
        self._spread = spread
        self._step_s = step_s
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._calls: dict[int, _Call] = {}
        # By (tag, number): start-time fair queueing, as in the worker.
        self._queue: list[tuple[int, int, float, SentForward]] = []
        self._next_tags: dict[int, int] = {}
        self._virtual_time = 0
        self._aborted: set[int] = set()
        self._computing = False
        self._numbers = 0

    def run(self, seconds: float) -> None:
        """Lets callers come for so long, and all of them be answered."""
        for group in self.groups:
            for _ in range(group.loops):
                self._begin(group, caller=id(group))
            if group.per_s:
                self._come_again(group, seconds)
        while self._events and self._events[0][0] < seconds + 5:
            self.now_s, _, act = heapq.heappop(self._events)
            if self.now_s >= seconds:
                for group in self.groups:
                    group.loops = 0
            act()

    def stop(self, seconds: float) -> None:
        """Nobody does anything for so long, and nobody notices: a paused machine."""
        self._events = [(when_s + seconds, number, act) for when_s, number, act in self._events]
        self.now_s += seconds

    def _at(self, when_s: float, act: Callable[[], None]) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (when_s, self._numbers, act))

    def _come_again(self, group: Group, until_s: float) -> None:
        def come() -> None:
            self._begin(group)
            self._come_again(group, until_s)

        when_s = self.now_s + self._rng.expovariate(group.per_s)
        if when_s < until_s:
            self._at(when_s, come)

    def _begin(self, group: Group, caller: int = 0) -> None:
        append = Append(
            AppendKind.PREFILL, "", [1] * group.tokens, timeout_s=group.timeout_s, priority=group.priority
        )
        self._numbers += 1
        caller = caller or self._numbers
        call = _Call(group, self.now_s, caller, group.items)
        for _ in range(group.items):
            (ticket,) = self.machine.submit([append], self.now_s, caller)
            self._calls[ticket] = call
            if group.timeout_s is not None:
                self._at(self.now_s + group.timeout_s, partial(self._leave, ticket))
        self._carry_out()

    def _leave(self, ticket: int) -> None:
        call = self._calls.pop(ticket, None)
        if call is not None:
            call.group.answers["late"] += 1
            self.machine.cancel(ticket, self.now_s)
            self._carry_out()
            self._again(call)

    def _carry_out(self) -> None:
        while (effects := self.machine.take_effects()) != Effects([], [], []):
            self._apply(effects)
        if self._numbers % 64 == 0:
            check_invariants(self.machine)
        if not self._computing:
            self._compute()

    def _apply(self, effects: Effects) -> None:
        for _, _, command in effects.commands:
            if isinstance(command, Operation):
                self._enqueue(forward_of(command))
            elif isinstance(command, AbortForward):
                self._aborted.add(command.target_op_id)
        self.machine.committed([ticket for ticket, _ in effects.writes], self.now_s)
        for ticket, outcome in effects.replies:
            self._answered(ticket, outcome)

    def _answered(self, ticket: int, outcome: Result | QuireError) -> None:
        call = self._calls.pop(ticket, None)
        if call is None:
            return
        group = call.group
        if isinstance(outcome, QuireError):
            group.answers[outcome.reason] += 1
            self._at(self.now_s + _PAUSE_S, lambda: self._again(call))
            return
        group.answers["OK"] += 1
        group.waits_s.append(self.now_s - call.began_s)
        assert isinstance(outcome, Appended)
        cache_id = outcome.cache_id
        self._at(self.now_s, lambda: self._release(cache_id, call))

    def _release(self, cache_id: str, call: _Call) -> None:
        self.machine.submit([Release(cache_id)], self.now_s)
        self._carry_out()
        self._again(call)

    def _again(self, call: _Call) -> None:
        call.missing -= 1
        if not call.missing and call.group.loops:
            self._begin(call.group, call.caller)

    def _enqueue(self, command: SentForward) -> None:
        tag = max(self._next_tags.get(command.caller, 0), self._virtual_time)
        self._next_tags[command.caller] = tag + len(command.append.token_ids)
        self._numbers += 1
        heapq.heappush(self._queue, (tag, self._numbers, self.now_s, command))

    def _compute(self) -> None:
        if self._step_s is not None:
            self._compute_all(self._step_s)
            return
        while self._queue:
            self._virtual_time, _, came_s, command = heapq.heappop(self._queue)
            if command.op_id not in self._aborted:
                self._computing = True
                self._compute_one(command, self.now_s - came_s)
                return

    def _compute_one(self, command: SentForward, waited_s: float) -> None:
        if waited_s > command.timeout_s:
            self._at(self.now_s, lambda: self._done((command.op_id, CommandFailed(DeadlinePassed()))))
            return
        tokens = len(command.append.token_ids)
        took_s = (tokens + 1) * self._token_s * self._rng.uniform(1 - self._spread, 1 + self._spread)
        self._at(self.now_s + took_s, lambda: self._done(done(command)))

    def _compute_all(self, step_s: float) -> None:
        """One step of everything there is, answered together."""
        commands = [command for *_, command in self._queue if command.op_id not in self._aborted]
        self._queue.clear()
        if commands:
            self._computing = True
            cost = sum(len(command.append.token_ids) + 1 for command in commands)
            spread = self._rng.uniform(1 - self._spread, 1 + self._spread)
            self._at(self.now_s + (step_s + cost * self._token_s) * spread, lambda: self._all_done(commands))

    def _all_done(self, commands: Sequence[SentForward]) -> None:
        self._computing = False
        self.machine.answered([done(command) for command in commands], self.now_s)
        self._carry_out()

    def _done(self, event: Event) -> None:
        self._computing = False
        self.machine.answered([event], self.now_s)
        self._carry_out()


def done(command: SentForward) -> Event:
    """The answer to a forward that keeps all of its tokens."""
    return command.op_id, worker_pb2.ForwardDone(kept=len(command.append.token_ids))
