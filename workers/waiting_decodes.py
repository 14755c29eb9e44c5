"""Plain decodes that are in no queue of the scheduler, because a step most likely takes all of them."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from workers.decodes import ARRIVAL, CALLER, DEADLINE, NEVER, NO_DECODES, OP_ID, Decodes
from workers.operations import Forward
from workers.service_class import DECODE_COST


class WaitingDecodes:
    """At most one for each sequence."""

    def __init__(self) -> None:
        self._parts: list[Decodes] = []
        self.sequences: set[int] = set()
        self.op_ids: set[int] = set()
        self._earliest_ns = NEVER

    def add(self, decodes: Decodes, arrivals: int) -> bool:
        """Add decodes, which are numbered from `arrivals` on.

        False, without an effect: one is there already, or another of its sequence.
        """
        op_ids, sequences = set(decodes.column(OP_ID)), set(decodes.sequences)
        is_new = self.op_ids.isdisjoint(op_ids) and self.sequences.isdisjoint(sequences)
        if not is_new or len(sequences) < decodes.size or len(op_ids) < decodes.size:
            return False
        decodes.columns[ARRIVAL] = np.arange(arrivals, arrivals + decodes.size)
        self._parts.append(decodes)
        self._earliest_ns = min(self._earliest_ns, *decodes.column(DEADLINE))
        self.op_ids |= op_ids
        self.sequences |= sequences
        return True

    def take(self) -> Decodes:
        """Remove and return all."""
        decodes = Decodes.joined(self._parts) if self._parts else NO_DECODES
        self._parts, self.sequences, self.op_ids, self._earliest_ns = [], set(), set(), NEVER
        return decodes

    def remove(self, column: int, values: Collection[int]) -> Decodes:
        """Remove and return those with these values in a column."""
        decodes, removed = self.take(), set(values)
        is_removed = np.array([value in removed for value in decodes.column(column)])
        self._keep(decodes.take(~is_removed))
        return decodes.take(is_removed)

    def expire(self, now_ns: int) -> list[Forward]:
        """Remove and return those whose deadline has passed, earliest deadline first."""
        if self._earliest_ns >= now_ns:
            return []
        decodes = self.take()
        late = decodes.columns[DEADLINE] < now_ns
        self._keep(decodes.take(~late))
        return sorted(as_forwards(decodes.take(late)), key=lambda one: (one.deadline_ns, one.arrival))

    def _keep(self, decodes: Decodes) -> None:
        if decodes.size:
            self._parts, self.sequences = [decodes], set(decodes.sequences)
            self.op_ids, self._earliest_ns = set(decodes.column(OP_ID)), int(decodes.columns[DEADLINE].min())


def as_forwards(decodes: Decodes) -> list[Forward]:
    """As forwards that can be queued: with their arrival and flow."""
    forwards = decodes.forwards()
    for forward, arrival, flow in zip(forwards, decodes.column(ARRIVAL), _flows(decodes), strict=True):
        forward.arrival, forward.flow = arrival, flow
    return forwards


def _flows(decodes: Decodes) -> list[int]:
    """The flow of each; see `Forward.flow`."""
    callers = decodes.column(CALLER)
    if 0 in callers:
        arrivals = decodes.column(ARRIVAL)
        return [caller or -1 - arrival for caller, arrival in zip(callers, arrivals, strict=True)]
    return callers


def costs_of(decodes: Decodes) -> dict[int, int]:
    """Their cost by flow."""
    costs: dict[int, int] = {}
    for flow in _flows(decodes):
        costs[flow] = costs.get(flow, 0) + DECODE_COST
    return costs
