"""The states of an operation: everything that says where an operation may go next is in this file.

`Operation.state` is one of these states, and changes only along `NEXT`. Each state has one module that moves
operations into it (`MOVED_BY`). The simulator checks every transition against both tables (`tests/sim/`), and
a test the table in ARCHITECTURE.md.

Other fields of an operation say more about its state, never something else: what a parked operation waits for
(`need`), the forward that a worker computes (`op_id`), the records that are with the journal (`records`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.Enum):
    """How far an operation has come."""

    # Its turn has not come on all of its caches: operations are ahead, or one of these is being released.
    WAITING = enum.auto()
    # Its turn has come, but it cannot be computed now: see `Need`.
    PARKED = enum.auto()
    # A worker computes tokens of the cache that it does not have.
    REPLAYING = enum.auto()
    # A worker computes the request.
    COMPUTING = enum.auto()
    # Its records are with the journal. It cannot be stopped any more.
    COMMITTING = enum.auto()
    # It is answered, or was cancelled, and is in no table any more.
    ENDED = enum.auto()


# For code that runs for each token: to look up a member of an enum takes 0.2 us on Python 3.11.
WAITING, PARKED, REPLAYING, COMPUTING = State.WAITING, State.PARKED, State.REPLAYING, State.COMPUTING
COMMITTING, ENDED = State.COMMITTING, State.ENDED

# To which states an operation may go from each.
NEXT: Final[Mapping[State, frozenset[State]]] = {
    # It begins. What needs no worker is written or answered at once. Of a fork, the release of one of its
    # caches may take back the turn that it has there already.
    WAITING: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, COMMITTING, ENDED}),
    # It is tried again, or its time is up. The release of its cache takes its turn back, here and below.
    PARKED: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, ENDED}),
    # All is computed, or the worker has failed and another one begins anew.
    REPLAYING: frozenset({WAITING, PARKED, REPLAYING, COMPUTING, ENDED}),
    # As above; and then its records are written. A scoring, or what is computed again, is answered at once.
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
