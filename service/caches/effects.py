"""The output of a turn, and what all parts share to write it: the time, and numbers.

Commands name a sequence by its number. An `op_id` is never used twice; the answer to a command contains it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from service.caches.entries import Operation, WorkerView
from service.caches.frozen_struct import frozen_struct
from service.caches.records import Record
from service.caches.requests import Result
from service.errors import QuireError

# Commands to a worker.


@frozen_struct
class ForkSequence:
    """Create `children` that share the pages of `number`."""

    op_id: int
    number: int
    children: Sequence[int]


@frozen_struct
class TruncateSequence:
    """Cut `number` to `new_len` tokens."""

    op_id: int
    number: int
    new_len: int


@frozen_struct
class ReleaseSequences:
    """Release sequences."""

    op_id: int
    numbers: Sequence[int]


@frozen_struct
class AbortForward:
    """Abort a forward."""

    op_id: int
    target_op_id: int


# An operation commands the forward that it describes. It is to be read before the next input, which may
# change it.
Command = Operation | ForkSequence | TruncateSequence | ReleaseSequences | AbortForward

# A command for one incarnation of a worker: its id, its epoch.
Send = tuple[str, int, Command]
# The records of an operation, by its ticket. They become durable together. The dispatcher reports the result
# (`committed` or `write_failed`); the records are applied and the caller is answered only then.
Write = tuple[int, Sequence[Record]]
# The result of an operation, by its ticket. One for each operation that was not cancelled.
Reply = tuple[int, Result | QuireError]


class Effects(NamedTuple):
    """What has to be done after some inputs, in this order: send, commit the records together, reply."""

    commands: list[Send]
    writes: list[Write]
    replies: list[Reply]


class Context:
    """The time of the current input, the effects so far, and the numbers of tickets, commands and caches."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.effects = Effects([], [], [])
        # For metrics. Those of a process share it.
        self.counts: Counter[str] = Counter()
        # What an adapter contains, by its number: see `Tenant.salt`.
        self.digest_of: Callable[[int], int | str] = lambda number: number
        # Returns a number that was never used before. Numbers only grow.
        self.number = itertools.count(1).__next__

    def skip_numbers(self, last: int) -> None:
        """Marks all numbers up to `last` as used."""
        self.number = itertools.count(max(self.number(), last + 1)).__next__

    def send(self, worker: WorkerView, command: Command) -> None:
        """Sends a command, unless this incarnation of the worker is lost."""
        if worker.is_ready:
            self.effects.commands.append((worker.worker_id, worker.epoch, command))

    def withdraw(self, op_id: int) -> bool:
        """Takes a command back. Returns False if it is not of this turn: then it was sent."""
        commands = self.effects.commands
        # They are in the order of their numbers.
        at = bisect_left(commands, op_id, key=_op_id_of)
        if at == len(commands) or _op_id_of(commands[at]) != op_id:
            return False
        del commands[at]
        return True


def _op_id_of(send: Send) -> int:
    return send[2].op_id


# Adoption of workers.


@frozen_struct
class Claim:
    """A sequence that a worker should keep, cut to `length`, if `digest` is that of its tokens and salt."""

    number: int
    length: int
    digest: bytes
