"""The states of an operation, and the transitions between them.

`Operation.state` changes only along `NEXT`. For each state one module moves operations into it (`MOVED_BY`).
The simulator checks every transition against both tables (`tests/sim/`), and a test compares them with the
table in ARCHITECTURE.md.

Other fields of an operation give details of its state: what a parked operation waits for (`need`), the
forward that a worker computes (`op_id`), the records that are with the journal (`records`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.Enum):
    """How far an operation has come."""

    # Its turn has not come on all of its caches: operations are ahead, or a cache is being released.
    WAITING = enum.auto()
    # Its turn has come, but it cannot be computed now: see `Need`.
    PARKED = enum.auto()
    # A worker computes tokens of the cache that it does not have.
    REPLAYING = enum.auto()
    # A worker computes the request.
    COMPUTING = enum.auto()
    # Its records are with the journal. It cannot be stopped any more.
    COMMITTING = enum.auto()
    # It was answered or cancelled, and no table has it any more.
    ENDED = enum.auto()


# For code that runs for each token: looking up a member of an enum takes 0.2 us on Python 3.11.
WAITING, PARKED, REPLAYING, COMPUTING = State.WAITING, State.PARKED, State.REPLAYING, State.COMPUTING
COMMITTING, ENDED = State.COMMITTING, State.ENDED

# The states to which an operation may go from each state.
NEXT: Final[Mapping[State, frozenset[State]]] = {
    # It begins. If it needs no worker, it is written or answered at once. A fork may have its turn on some of
    # its caches already; the release of such a cache takes that turn back.
    WAITING: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, COMMITTING, ENDED}),
    # It is tried again, or its time is up. In this state and the next two, the release of its cache takes
    # its turn back.
    PARKED: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, ENDED}),
    # The replay is done, or the worker has failed and another one starts from the beginning.
    REPLAYING: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, ENDED}),
    # As above; or it is done, and its records are written. Scorings and repetitions have none: they end.
    COMPUTING: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, COMMITTING, ENDED}),
    # The records are durable, or could not be written.
    COMMITTING: frozenset({ENDED}),
    ENDED: frozenset(),
}

# The module that moves operations into a state.
MOVED_BY: Final[Mapping[State, str]] = {
    WAITING: "queues",
    PARKED: "parked",
    REPLAYING: "attempts",
    COMPUTING: "attempts",
    COMMITTING: "queues",
    ENDED: "queues",
}
