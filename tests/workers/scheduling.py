"""Drives a scheduler without an engine: forwards begin at once, and steps compute nothing.

`Callers` adds a clock: callers that come back with their next forward, and steps that take time. Nothing is
measured.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from operator import attrgetter

import numpy as np

from workers.decodes import NEVER, Decodes, Mask
from workers.forward_queues import SHORT_TOKENS
from workers.operations import Chunk, Forward, Kind, Priority
from workers.scheduler import Scheduler
from workers.service_class import ServiceClass

_by_arrival = attrgetter("arrival")


def accept(forward: Forward, reused: int = 0) -> bool:
    """What the step loop's `begin` does, without an engine."""
    forward.has_begun, forward.reused, forward.computed = True, reused, reused
    return True


def accept_all(decodes: Decodes) -> Mask:
    """The same for plain decodes."""
    return np.ones(decodes.size, np.bool_)


def advance(scheduler: Scheduler, chunk: Chunk) -> bool:
    """Run a chunk, as the engine's `execute` does, and tell the scheduler."""
    chunk.forward.computed += chunk.count
    return scheduler.advance(chunk)


def run_step(scheduler: Scheduler, begin: Callable[[Forward], bool] = accept) -> list[Chunk]:
    """Run one step whole."""
    chunks = scheduler.next_batch(begin, accept_all)
    for chunk in chunks:
        advance(scheduler, chunk)
    return chunks


def check_invariants(scheduler: Scheduler) -> None:
    """Assert that lines, queues, deadlines and counts agree."""
    queued = scheduler._queues
    queues = [list(forwards.values()) for forwards in queued.by_sequence.values()]
    held = sorted(queued.forwards.values(), key=_by_arrival)
    assert sorted((forward for forwards in queues for forward in forwards), key=_by_arrival) == held
    for forwards in queues:
        assert forwards == sorted(forwards, key=_by_arrival)
        assert [forward.is_enqueued for forward in forwards] == [True] + [False] * (len(forwards) - 1)
        assert not any(forward.has_begun for forward in forwards[1:])
    assert all(forward.is_long == (forward.remaining > SHORT_TOKENS) for forward in held)
    _check_class(queued.short, [one for one in held if not one.is_long])
    _check_class(queued.long, [one for one in held if one.is_long])
    deadlines = [one.deadline_ns for one in held if one.deadline_ns is not None and not one.has_begun]
    assert queued._earliest_ns <= min(deadlines, default=NEVER)


def _check_class(service_class: ServiceClass, held: list[Forward]) -> None:
    """`held`: the forwards of the class, by arrival."""
    by_order = attrgetter("virtual_start", "arrival")
    assert service_class.queue == sorted((forward for forward in held if forward.is_enqueued), key=by_order)
    assert all(forward.virtual_start <= service_class.virtual_time for forward in held if forward.has_begun)
    by_caller: dict[int, list[Forward]] = {}
    for forward in held:
        by_caller.setdefault(forward.caller, []).append(forward)
    flows = {
        caller: (flow.forwards, flow.cost) for caller, flow in service_class.flows.items() if flow.forwards
    }
    assert flows == {caller: (len(own), sum(one.cost for one in own)) for caller, own in by_caller.items()}
    assert service_class.cost == sum(forward.cost for forward in held)
    assert service_class._num_callers == len(by_caller)
    for caller, own in by_caller.items():
        starts = [one.virtual_start for one in own if not one.has_begun and one.priority is Priority.NORMAL]
        assert all(earlier < later for earlier, later in pairwise(starts))
        assert all(start < service_class.flows[caller].next_start for start in starts)


class Bench:
    """A scheduler whose every operation is of a sequence of its own, as the gateway sends them."""

    def __init__(self, items: int, tokens: int = 10_000, rows: int = 10_000) -> None:
        self.scheduler = Scheduler(tokens, items, rows)
        self.begun: Counter[int] = Counter()
        self.asked: dict[int, Forward] = {}

    def add(self, caller: int, operations: int = 1, tokens: int = 1, **settings: object) -> list[int]:
        """Queue operations of a caller; return their ids. 0: each has a caller of its own."""
        added = []
        for _ in range(operations):
            op_id = len(self.asked)
            number = caller or -1 - op_id
            forward = Forward(op_id, op_id, 0, range(tokens), caller=number, **settings)  # type: ignore[arg-type]
            self.scheduler.add(forward)
            self.asked[op_id] = forward
            added.append(op_id)
        return added

    def step(self, begin: Callable[[Forward], bool] = accept) -> list[int]:
        """Run one step; return the ids of the operations in it."""
        chunks = run_step(self.scheduler, begin)
        self.begun.update(max(0, chunk.forward.caller) for chunk in chunks if chunk.start == 0)
        check_invariants(self.scheduler)
        return [chunk.forward.op_id for chunk in chunks]

    def callers(self, op_ids: Sequence[int]) -> Counter[int]:
        return Counter(max(0, self.asked[op_id].caller) for op_id in op_ids)


@dataclass(frozen=True)
class _Loop:
    """What a caller sends again and again, each time so long after the answer."""

    caller: int
    tokens: int
    rows: int
    kind: Kind
    think_ns: int


@dataclass
class Callers:
    """A scheduler, callers who come back with their next forward, and steps that take time.

    base_ns, unit_ns: what a step costs, and each unit of what is in it.
    """

    base_ns: int
    unit_ns: int
    items: int = 256
    now_ns: int = 0
    # By caller: how long each of its forwards took, and the cost of all that was computed.
    waits_ns: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    served: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(512, self.items, 256)
        self._op_ids = count()
        # (when, op id, what), and what is asked for, by op id, with when it came.
        self._to_come: list[tuple[int, int, _Loop]] = []
        self._asked: dict[int, tuple[int, _Loop]] = {}

    def add(
        self,
        caller: int,
        loops: int,
        tokens: int = 1,
        think_ns: int = 0,
        *,
        rows: int | None = None,
        kind: Kind = Kind.PREFILL,
    ) -> None:
        """So many loops of a caller, each of which sends its next forward `think_ns` after an answer.

        `rows`: None: of all tokens.
        """
        for loop in range(loops):
            first_ns = self.now_ns + think_ns * loop // loops
            what = _Loop(caller, tokens, tokens if rows is None else rows, kind, think_ns)
            heapq.heappush(self._to_come, (first_ns, next(self._op_ids), what))

    def step(self) -> list[Chunk]:
        """Run one, after the moment there is something to run."""
        if not len(self.scheduler):
            self.now_ns = max(self.now_ns, self._to_come[0][0])
        while self._to_come and self._to_come[0][0] <= self.now_ns:
            came_ns, op_id, loop = heapq.heappop(self._to_come)
            tokens, rows = range(loop.tokens), loop.rows
            self.scheduler.add(
                Forward(op_id, op_id, 0, tokens, rows=rows, caller=loop.caller, kind=loop.kind)
            )
            self._asked[op_id] = came_ns, loop
        chunks = self.scheduler.next_batch(accept, accept_all)
        took_ns = self.base_ns + self.unit_ns * cost(chunks)
        self.now_ns += took_ns
        self.scheduler.record_step(chunks, took_ns)
        for chunk in chunks:
            forward = chunk.forward
            came_ns, loop = self._asked[forward.op_id]
            self.served[loop.caller] += chunk.count + chunk.rows
            if advance(self.scheduler, chunk):
                del self._asked[forward.op_id]
                self.waits_ns[loop.caller].append(self.now_ns - came_ns)
                heapq.heappush(self._to_come, (self.now_ns + loop.think_ns, next(self._op_ids), loop))
        return chunks


def cost(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.count + chunk.rows * chunk.forward.output.row_weight for chunk in chunks)
